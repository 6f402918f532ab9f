"""Tile statistics of a plan: what a blocked attention kernel would visit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gistkit._compiled import planner as _planner
from gistkit.common.checks import at_least


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of the (queries x keys) grid, counted, and in lists both ways, which are made when they are first read.

    The entries of list i are `entries[offsets[i]:offsets[i + 1]]`, ascending, each 2 * tile + 1 where some pairs of the
    tile are masked (partial) and 2 * tile where none is (full); tiles with nothing to see (empty) are absent.

    Counting takes time and memory by the rows alone, lists by the tiles that are visited.

    Args:
        full, partial, empty: number of tiles of each kind.
        useful: share of the pairs in visited tiles that are visible, 0 to 1.
    """

    full: int
    partial: int
    empty: int
    useful: float
    _spans: NDArray[np.int32] = field(repr=False)
    _num_keys: int = field(repr=False)
    _shape: tuple[int, int] = field(repr=False)

    @cached_property
    def _lists(self) -> tuple[NDArray[np.int64], ...]:
        return _planner.tiles(self._spans, self._num_keys, *self._shape)

    @property
    def key_offsets(self) -> NDArray[np.int64]:
        """int64; where the list of key tiles of each query tile begins, batch row by batch row."""
        return self._lists[0]

    @property
    def key_entries(self) -> NDArray[np.int64]:
        """int64; the key tiles of each query tile."""
        return self._lists[1]

    @property
    def query_offsets(self) -> NDArray[np.int64]:
        """int64; where the list of query tiles of each key tile begins, batch row by batch row."""
        return self._lists[2]

    @property
    def query_entries(self) -> NDArray[np.int64]:
        """int64; the query tiles of each key tile."""
        return self._lists[3]


def tiles_of(spans: Tensor, num_keys: int, tile_queries: int, tile_keys: int) -> Tiles:
    """The tiles of spans [B or 1, Nq, S, 2], which are copied to the host; `tile_queries`, `tile_keys`: at least 1."""
    tile_queries = at_least("tiles", "tile_queries", tile_queries, 1)
    tile_keys = at_least("tiles", "tile_keys", tile_keys, 1)
    rows = np.ascontiguousarray(spans.cpu().numpy())
    full, partial, visible, visited = _planner.tile_counts(rows, num_keys, tile_queries, tile_keys)
    total = rows.shape[0] * -(-rows.shape[1] // tile_queries) * -(-num_keys // tile_keys)
    useful = visible / visited if visited else 1.0
    return Tiles(full, partial, total - full - partial, useful, rows, num_keys, (tile_queries, tile_keys))
