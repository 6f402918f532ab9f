"""Embeddings that are computed once while the encoder's weights do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows are computed so many at a time, which bounds what the encoder needs beside them.
PART = 4096
# Numbers from each of a few new ones on that are computed with it, as others may follow one by one.
AHEAD, FEW = 64, 32


class KeptEmbeddings:
    """Embeddings of the numbers that were asked for. Other weights, or another autocast, start over.

    Args:
        module: whose weights make them.
        encode: embeddings [U, D] of distinct numbers int64 [U], ascending, on the CPU.
        last: the largest number.
        ahead: whether numbers that follow a few new ones are computed too.
    """

    def __init__(self, module: nn.Module, encode: Callable[[Tensor], Tensor], last: int, *, ahead: bool) -> None:
        self._module, self._encode, self._last, self._ahead = module, encode, last, ahead
        # Ascending, and the row of each.
        self._numbers, self._rows = torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
        # Kept alive, so that no other weight gets the id of one of them.
        self._weights: list[Tensor] = []
        self._state: list[Any] = []

    def forget(self) -> None:
        """Starts over."""
        self._numbers = self._numbers[:0]

    def look_up(self, numbers: Tensor) -> Tensor | None:
        """Embeddings [P, D] of numbers int64 [P] on the CPU, computed where new; None for weights without data."""
        weights: list[Tensor] = [*self._module.parameters()]
        device = weights[0].device.type
        try:
            state: list[Any] = [(id(one), 0 if one.is_inference() else one._version, one.data_ptr()) for one in weights]
        except RuntimeError:
            # Those of torch.func.vmap have none of their own.
            return None
        state.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        if state != self._state:
            self._weights, self._state = weights, state
            self.forget()
        new = self._new(numbers)
        if self._ahead and 0 < len(new) <= FEW:
            following = (new[:, None] + torch.arange(AHEAD)).flatten()
            # A sum beyond int64 is below 0.
            new = self._new(following[(following >= 0) & (following <= self._last)])
        if len(new):
            parts = [self._encode(part) for part in new.split(PART)]
            rows = torch.cat([*([self._rows] if len(self._numbers) else []), *parts])
            self._numbers, order = torch.cat([self._numbers, new]).sort()
            self._rows = rows[order.to(rows.device)]
        places = torch.searchsorted(self._numbers, numbers)
        return F.embedding(places.to(self._rows.device, non_blocking=True), self._rows)

    def _new(self, numbers: Tensor) -> Tensor:
        """The distinct numbers that are not kept, ascending."""
        distinct = numbers.unique()
        return distinct[torch.isin(distinct, self._numbers, assume_unique=True, invert=True)]
