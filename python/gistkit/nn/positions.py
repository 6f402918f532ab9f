"""PositionEncoding, the interface of all position encodings, and NoPE, which adds nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class PositionEncoding(nn.Module):
    """How a model encodes positions. Methods do nothing unless a subclass overrides them.

    A model calls `embed` and `prepare` once per pass, `forward` in each layer, and `key_bias` once over all keys.
    Positions are [N] or [B, N] for text (axes = 1) and [N, axes] or [B, N, axes] for images, integers, on the CPU or on
    the model's device; a row of [B, ...] may start anywhere.

    Args:
        axes: numbers in a position; None: any.
        extra_tokens: tokens without a position before those that have one, such as a ViT's [CLS]. Hidden states,
            queries and keys have them, positions and embeddings do not.
    """

    on_host = False
    """Whether positions are read on the CPU: a model makes those that it is not given there, and nothing is copied."""

    own_layers: int | None = None
    """Layers of the model, if each has parameters of its own."""

    def __init__(self, axes: int | None = 1, extra_tokens: int = 0) -> None:
        super().__init__()
        if axes is not None and axes < 1:
            raise ValueError(f"axes: expected at least 1, or None for any, got {axes}")
        if extra_tokens < 0:
            raise ValueError(f"extra_tokens: expected at least 0, got {extra_tokens}")
        self.axes, self.extra_tokens = axes, extra_tokens

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The embedded tokens [B, extra + N, dim], with what the encoding adds to them before the first layer."""
        return hidden

    def prepare(self, positions: Tensor, embeddings: Tensor | None = None) -> Any:
        """What `forward` takes as `prepared`, made once for all layers of a pass.

        Args:
            embeddings: [N, out_dim] or [B, N, out_dim], the outputs of SeqPE's encoder at these positions, if the
                caller has them; the encoder is then not run.
        """
        if embeddings is not None:
            raise ValueError(f"embeddings: expected none for {type(self).__name__}, which has no encoder, got a tensor")
        return None

    def forward(self, query: Tensor, key: Tensor, prepared: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Queries [B, H, extra + N, D] and keys [B, Hk, extra + N, D] of layer `layer`, from 0, with their positions.

        The result may be wider than D; attention's scale stays that of D.
        """
        return query, key

    def key_bias(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """[1 or B, H, Nk], what is added to the scaled logits of each key; None: nothing."""
        return None

    def frozen(self, positions: Tensor | None = None) -> AbstractContextManager[None]:
        """Inside the `with` block the encoding's results are cached while its weights stay as they are; see `SeqPE`.

        Args:
            positions: encoded when the block begins.
        """
        return nullcontext()

    def check_cached(self, positions: Tensor) -> None:
        """Raises a ValueError if tokens at `positions` would change the encoding of cached tokens."""


class NoPE(PositionEncoding):
    """No position encoding."""

    def __init__(self, axes: int | None = None, extra_tokens: int = 0) -> None:
        super().__init__(axes, extra_tokens)


def grid_positions(
    height: int, width: int, start: tuple[int, int] = (0, 0), device: torch.device | str | None = None
) -> Tensor:
    """int64 [height * width, 2], the (row, column) of each patch of an image in row-major order, from `start`."""
    rows = torch.arange(start[0], start[0] + height, device=device)
    columns = torch.arange(start[1], start[1] + width, device=device)
    return torch.cartesian_prod(rows, columns)


def rows_of(positions: Tensor, axes: int) -> Tensor:
    """Positions as [B or 1, N, axes], on the device where they are.

    Raises:
        ValueError: for another shape, or a position below 0, which is checked only on the CPU.
        TypeError: for anything but a tensor of numbers.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions: expected a torch tensor, got {type(positions).__name__}")
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions: expected an integer dtype, got {positions.dtype}")
    expected = "[N] or [B, N]" if axes == 1 else f"[N, {axes}] or [B, N, {axes}]"
    points = positions[..., None] if axes == 1 else positions
    if points.dim() not in (2, 3) or points.shape[-1] != axes:
        raise ValueError(f"positions: expected {expected}, got shape {tuple(positions.shape)}")
    if positions.device.type == "cpu" and not torch.compiler.is_compiling() and bool((positions < 0).any()):
        raise ValueError(f"positions: expected at least 0, got {positions.min().item()}")
    return points if points.dim() == 3 else points[None]
