"""KeptKeys: keys and values that a pass leaves behind, for training with gradient checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]


class Keeper(Protocol):
    """What `model(..., keep=...)` takes inside `attach`."""

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Receives the rotated keys and the values [B, Hk, N, D] that layer `layer_idx` made."""


class KeptKeys:
    """Keeps some rows of every layer's rotated keys and values, with their gradients.

    Give it to one pass as `keep` and its `layers` to the next as `memory`. Unlike transformers' caches it works with
    gradient checkpointing (use_reentrant=False), which runs every layer once more in the backward pass.

    Args:
        rows: the rows to keep, as a slice or as int64 indices [K], or [B, K] where each row of the batch has its own.
    """

    def __init__(self, rows: slice | Tensor) -> None:
        self.rows = rows
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Keeps the rows of key and value [B, Hk, N, D]; only the first call of a layer counts."""
        # Taken in every call: a layer that runs again must save the same tensors as the first time.
        kept = self._take(key), self._take(value)
        self._layers.setdefault(layer_idx, kept)

    def _take(self, tensor: Tensor) -> Tensor:
        if isinstance(self.rows, Tensor) and self.rows.dim() == 2:
            return tensor.take_along_dim(self.rows[:, None, :, None], 2)
        rows = tensor[:, :, self.rows]
        # A view would keep the keys of all rows alive; with gradients the graph does so anyway.
        return rows if torch.is_grad_enabled() else rows.clone()

    @property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(key, value) of each layer in order, [B, Hk, K, D]."""
        return tuple(self._layers[index] for index in sorted(self._layers))
