"""KVCache: the keys, values and positions of the tokens that a model has read."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys are cached after their position encoding, so later tokens do not change them."""

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        # Of a pass that failed, too; those of the first `len(self)` tokens are held.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Tokens held."""
        return 0 if self.positions is None else self.positions.shape[1]

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        """int64 [1 or B, count], the positions after each row's last; from 0 if the cache is empty."""
        steps = torch.arange(count, device=device)[None]
        return steps if self.positions is None else self.positions[:, -1:].to(device) + 1 + steps

    def check_batch(self, batch: int) -> None:
        """Raises a ValueError if the cache holds another number of rows."""
        if len(self) and self._layers[0][0].shape[0] != batch:
            raise ValueError(f"cache: expected a batch of {self._layers[0][0].shape[0]} as it holds, got {batch}")

    def followed_by(self, positions: Tensor) -> Tensor:
        """All positions [1 or B, K + N]: the cached ones, then those of new tokens [N] or [B, N]."""
        new = positions if positions.dim() == 2 else positions[None]
        if self.positions is not None:
            rows = max(new.shape[0], self.positions.shape[0])
            held = self.positions.to(new.device)
            new = torch.cat([held.expand(rows, -1), new.expand(rows, -1)], 1)
        return new

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys [B, H, K + N, D] and values of a layer: cached ones, then new ones.

        The new ones count once their `positions` are set, after the last layer.
        """
        if held := len(self):
            keys, values = (part[:, :, :held] for part in self._layers[layer])
            key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        self._layers[layer] = key, value
        return key, value
