"""What a pass over [BOS][context][gists] leaves of its layers: outputs moved one layer down, or pooled activations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gistkit import hf, ops
from gistkit.hf.keep import Rope

# A context in which a layer's own projections are those of the text, whatever adapters the pass runs with.
AsText = Callable[[], AbstractContextManager[None]]


class _WithBos(hf.Keeper):
    """Keeps the first row's keys as attention made them, and beside them what `_made` makes of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Holds key and value until the layer is left."""
        self._given[layer_idx] = key, value

    def leave(self, layer_idx: int, layer: nn.Module, before: Tensor, after: Tensor, rope: Rope) -> None:
        """Keeps [BOS][made rows]; only the first call of a layer counts."""
        key, value = self._given.pop(layer_idx)
        made_key, made_value = self._made(layer, before, after, key, value, rope)
        self.keep(layer_idx, torch.cat([key[:, :, :1], made_key], 2), torch.cat([value[:, :, :1], made_value], 2))

    def _made(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class OffsetKeys(_WithBos):
    """Keys and values of layer l made of the gists' OUTPUT of layer l, by the text's norm and projections of layer l.

    The last layer's output is taken before the model's final norm; BOS is not offset (GistPool, Section 5.1, Figure 3).

    Args:
        rows: of the gists.
        as_text: see `AsText`.
    """

    def __init__(self, rows: slice, as_text: AsText) -> None:
        super().__init__()
        self.rows, self.as_text = rows, as_text

    def _made(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        positions, inv_freq, scaling = rope
        with self.as_text():
            return hf.project_keys(layer, after[:, self.rows], positions[..., self.rows], inv_freq, scaling)


class PooledKeys(_WithBos):
    """Keys and values of means over windows of the context (GistPool, Section 4).

    Args:
        rows: of the context.
        windows: int64 [W + 1] or [B, W + 1], where windows begin and end among these rows.
        positions: int64 or float64 [W] or [B, W], position ids of the pooled keys.
        of_hidden: means of a layer's input hidden states, through the layer's norm and projections; otherwise of the
            layer's values and of its keys as they are before rotation.
        as_text: see `AsText`.
    """

    def __init__(self, rows: slice, windows: Tensor, positions: Tensor, of_hidden: bool, as_text: AsText) -> None:
        super().__init__()
        self.rows, self.windows, self.positions = rows, windows, positions
        self.of_hidden, self.as_text = of_hidden, as_text

    def _made(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        positions, inv_freq, scaling = rope
        if self.of_hidden:
            pooled = ops.window_pool(before[:, self.rows], windows=self.windows)
            with self.as_text():
                return hf.project_keys(layer, pooled, self.positions, inv_freq, scaling)
        # Keys carry the factor `scaling` once: turning them back and on again must not apply it twice.
        plain = ops.rerotate(key[:, :, self.rows], -positions[..., self.rows], inv_freq)
        return ops.window_pool(
            plain, value[:, :, self.rows], windows=self.windows, positions=self.positions, inv_freq=inv_freq
        )
