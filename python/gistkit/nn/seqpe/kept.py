"""Embeddings that are computed once while the encoder's weights do not change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What would take more than these bytes is not kept.
MOST_BYTES = 1 << 29
# Rows are computed so many at a time, which bounds what the encoder needs beside them.
PART = 4096
_WANTS_GRADIENT = attrgetter("requires_grad")


class KeptEmbeddings:
    """Embeddings of the numbers that were asked for, those of the weights at the first of them.

    Args:
        module: whose weights make them.
        encode: embeddings [U, D] of distinct numbers int64 [U], ascending, on the CPU.
        last: the largest number.
        row_bytes: of an embedding.
        ahead: whether numbers that follow the ones asked for are computed too, in all as many as are kept already, so
            that a count one by one computes something only each time that it has doubled.
    """

    def __init__(
        self, module: nn.Module, encode: Callable[[Tensor], Tensor], last: int, row_bytes: int, *, ahead: bool
    ) -> None:
        self._module, self._encode, self._last, self._ahead = module, encode, last, ahead
        self._most = MOST_BYTES // row_bytes
        # Ascending, and the row of each.
        self._numbers, self._order = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._rows = torch.empty(0, 0)
        self._weights: dict[str, Tensor] = {}
        self._tables: list[dict[str, Any]] = []
        for part in module.modules():
            self._tables += [part._modules, part._parameters, part._buffers]
        # References, so that no other object gets the id of one of them.
        self._objects = [*chain.from_iterable(map(dict.values, self._tables))]
        self._ids = self._now()
        self._tensors = [found for found in self._objects if isinstance(found, Tensor)]

    def serves(self) -> bool:
        """Whether the module's parts and weights are the same objects, and no gradient of them is wanted."""
        if self._now() != self._ids:
            # Such as inside torch.func.functional_call.
            return False
        return not (torch.is_grad_enabled() and any(map(_WANTS_GRADIENT, self._tensors)))

    def look_up(self, numbers: Tensor) -> Tensor | None:
        """Embeddings [P, D] of numbers int64 [P] on the CPU, computed where they are new; None if there is no room."""
        rows = self._find(numbers)
        if rows is None:
            self.add(numbers)
            rows = self._find(numbers)
        return None if rows is None else F.embedding(rows.to(self._rows.device, non_blocking=True), self._rows)

    def add(self, numbers: Tensor) -> None:
        """Keeps the embeddings of numbers int64 [P] on the CPU too, unless there is no room for them."""
        new = self._new(numbers)
        if not len(new):
            return
        if self._ahead and (steps := len(self._numbers) // len(new)):
            following = new[:, None] + torch.arange(steps + 1)
            # A sum beyond int64 is below 0.
            more = self._new(following[(following >= 0) & (following <= self._last)])
            new = more if len(self._numbers) + len(more) <= self._most else new
        if len(self._numbers) + len(new) <= self._most:
            self._compute(new)

    def changed(self) -> list[str]:
        """The names of weights that have changed since the embeddings were computed."""
        if not self._weights:
            return []
        now = self._named()
        names = [name for name in self._weights if name not in now or not _same(self._weights[name], now[name])]
        return names + [name for name in now if name not in self._weights]

    def _now(self) -> list[int]:
        # Without a loop in Python: this runs at every look-up.
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]

    def _named(self) -> dict[str, Tensor]:
        return dict(chain(self._module.named_parameters(), self._module.named_buffers()))

    def _find(self, numbers: Tensor) -> Tensor | None:
        """The row of each number; None if any has none."""
        if not len(self._numbers):
            return None
        at = torch.searchsorted(self._numbers, numbers).clamp_(max=len(self._numbers) - 1)
        return self._order[at] if torch.equal(self._numbers[at], numbers) else None

    def _new(self, numbers: Tensor) -> Tensor:
        """The distinct numbers that are not kept, ascending."""
        distinct = numbers.unique()
        return distinct[torch.isin(distinct, self._numbers, assume_unique=True, invert=True)]

    def _compute(self, new: Tensor) -> None:
        # Rows of inference mode could not be added to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if not self._weights:
                self._weights = {name: weight.detach().clone() for name, weight in self._named().items()}
            held = total = len(self._numbers)
            rows = self._rows
            for part in new.split(PART):
                found = self._encode(part)
                total += len(part)
                if total > len(rows):
                    larger = found.new_empty(max(min(2 * len(rows), self._most), held + len(new)), found.shape[1])
                    larger[: len(rows)] = rows.view(len(rows), found.shape[1])
                    rows = larger
                rows[total - len(part) : total] = found
            numbers, order = torch.cat([self._numbers, new]).sort()
            self._order = torch.cat([self._order, torch.arange(held, total)])[order]
            self._numbers, self._rows = numbers, rows


def _same(before: Tensor, now: Tensor) -> bool:
    if (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
        return False
    return torch.equal(before, now) or torch.allclose(before, now, rtol=0.0, atol=0.0, equal_nan=True)
