"""StreamCache: the keys and values of a stream's tokens that later tokens can still see."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from gistkit import hf
from gistkit.common.checks import padded, placed
from gistkit.hf.cache import MemoryCache, MemoryLayer
from gistkit.hf.keep import Layers
from gistkit.layouts import Plan


class StreamCache:
    """The keys of a batch's tokens that later tokens can still see; the others are dropped, many at a time.

    The first columns of the cache hold the keys of each row that stayed at the last clearing, padded at the end. The
    columns after them hold the tokens since then, one column a token for all rows.

    Args:
        layers: (key, value) of each layer, [B, Hk, K, D].
        positions: of the keys of each row, ascending, at most K.
        for_good: the positions of each row that stay for good; BOS does too.
        first: a function from a token's position to the first position that it sees uncompressed.
        ends: position of the next token of each row, which sees these keys.
        room: about how many tokens there are until the next clearing.
        lag: at most so many unseen tokens of a row wait to be dropped together; 0 unless only BOS stays for good.
    """

    def __init__(
        self,
        layers: Layers,
        positions: Sequence[Sequence[int]],
        for_good: Sequence[Iterable[int]],
        first: Callable[[int], int],
        ends: Sequence[int],
        room: int,
        lag: int = 0,
    ) -> None:
        self.first, self.room, self.lag = first, room, lag
        self.old = [list(row) for row in positions]
        self.new: list[list[int]] = [[] for _ in positions]
        self.for_good = [{0, *row} for row in for_good]
        self.firsts = [first(end) for end in ends]
        self._put(layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """Keys of each row in the cache."""
        return tuple(len(old) + len(new) for old, new in zip(self.old, self.new, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values, padding included."""
        return sum(tensor.nbytes for layer in self.cache.held for tensor in layer)

    def clear(self, positions: Sequence[int]) -> None:
        """Drops the keys that tokens from these positions on do not see."""
        firsts = [self.first(position) for position in positions]
        if all(first - before <= self.lag for first, before in zip(firsts, self.firsts, strict=True)):
            return
        layers, remaining = self._remaining(firsts)
        index = padded([[column for column, _ in row] for row in remaining], device=layers[0][0].device)
        self._put([(_columns_of(key, index), _columns_of(value, index)) for key, value in layers])
        self.firsts = firsts
        self.old, self.new = [[position for _, position in row] for row in remaining], [[] for _ in remaining]

    def plan(self, positions: Sequence[int], windows: Iterable[int]) -> Plan:
        """The plan of one new token in each row, at these positions, which sees the cached keys and itself."""
        device = self.cache.held[0][0].device
        keys = self.width + len(self.new[0]) + 1

        def spans(window: int | None) -> Tensor:
            rows = []
            for old, new, position in zip(self.old, self.new, positions, strict=True):
                # A sliding window hides older tokens, BOS included.
                oldest = 0 if window is None else position - window + 1
                begin = max(oldest, self.first(position)) if self.lag else oldest
                a, b = bisect_left(old, begin), self.width + bisect_left(new, begin)
                intervals = [[0, 1], [a, len(old)], [b, keys]] if oldest <= 0 < begin else [[a, len(old)], [b, keys]]
                nonempty = [span for span in intervals if span[0] < span[1]]
                rows.append([nonempty + [[0, 0]] * (3 - len(nonempty))])
            return placed(rows, device, torch.int32)

        at = placed(positions, device)[:, None]
        plan = Plan(spans(None), keys, at, reach=max(positions) + 1)
        return plan.with_windows({window: spans(window) for window in windows})

    def add(self, positions: Sequence[int], stay: Sequence[bool]) -> None:
        """Records that the tokens of the plan were read; those of `stay` stay for good."""
        for row, (position, row_stays) in enumerate(zip(positions, stay, strict=True)):
            self.new[row].append(position)
            if row_stays:
                self.for_good[row].add(position)

    def take_back(self, positions: Sequence[int]) -> None:
        """Drops what there is of tokens from these positions on, which not all layers may have."""
        for row, position in enumerate(positions):
            self.new[row] = [own for own in self.new[row] if own < position]
            self.for_good[row] = {own for own in self.for_good[row] if own < position}
        for cache in self._caches():
            for layer in cast("list[MemoryLayer]", cache.layers):
                layer.crop(self.width + len(self.new[0]) - layer.num_keys)

    def _columns(self, row: int) -> list[tuple[int, int]]:
        """The columns of a row's keys and their positions, ascending."""
        return [*enumerate(self.old[row]), *enumerate(self.new[row], self.width)]

    def _remaining(self, firsts: Sequence[int]) -> tuple[Layers, list[list[tuple[int, int]]]]:
        """Layers, and for each row the columns that stay with their positions; tokens from `firsts` on stay."""
        stay = [
            [
                (column, position)
                for column, position in self._columns(row)
                if position >= first or position in self.for_good[row]
            ]
            for row, first in enumerate(firsts)
        ]
        return self._held(), stay

    def keeper(self) -> hf.Keeper | None:
        """Collects what the cache keeps of a new token besides its keys and values; None: nothing."""
        return None

    def _caches(self) -> list[MemoryCache]:
        """What the columns are of."""
        return [self.cache]

    def _held(self) -> Layers:
        """What each column holds."""
        return [layer for cache in self._caches() for layer in cache.held]

    def _put(self, layers: Layers) -> None:
        self.cache = hf.memory_cache(layers, 0, capacity=self.room)
        self.width = self.cache.get_query_offset()


def _columns_of(tensor: Tensor, index: Tensor) -> Tensor:
    """Columns [B, K] of a tensor [B, H, N, D], each copied as a whole, which a gather by element does not."""
    batch, heads, _, dim = tensor.shape
    out = tensor.new_empty((batch, heads, index.shape[1], dim))
    for row in range(batch):
        torch.index_select(tensor[row], 1, index[row], out=out[row])
    return out
