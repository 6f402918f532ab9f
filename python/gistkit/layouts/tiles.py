"""Tile statistics of a plan: what a blocked attention kernel would visit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gistkit._checks import at_least
from gistkit._compiled import planner as _planner


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of the (queries x keys) grid, in lists both ways.

    The entries of list i are `entries[offsets[i]:offsets[i + 1]]`, ascending, each 2 * tile + 1 where some pairs of the
    tile are masked (partial) and 2 * tile where none is (full); tiles with nothing to see (empty) are absent.

    Args:
        key_offsets, key_entries: int64; the key tiles of each query tile, batch row by batch row.
        query_offsets, query_entries: int64; the query tiles of each key tile, batch row by batch row.
        full, partial, empty: number of tiles of each kind.
        useful: share of the pairs in visited tiles that are visible, 0 to 1.
    """

    key_offsets: NDArray[np.int64]
    key_entries: NDArray[np.int64]
    query_offsets: NDArray[np.int64]
    query_entries: NDArray[np.int64]
    full: int
    partial: int
    empty: int
    useful: float


def tiles_of(spans: Tensor, num_keys: int, tile_queries: int, tile_keys: int) -> Tiles:
    """The tiles of spans [B or 1, Nq, S, 2], which are copied to the host; `tile_queries`, `tile_keys`: at least 1."""
    tile_queries = at_least("tiles", "tile_queries", tile_queries, 1)
    tile_keys = at_least("tiles", "tile_keys", tile_keys, 1)
    rows = np.ascontiguousarray(spans.cpu().numpy())
    keys_at, keys, queries_at, queries, full, partial, visible, visited = _planner.tiles(
        rows, num_keys, tile_queries, tile_keys
    )
    total = rows.shape[0] * -(-rows.shape[1] // tile_queries) * -(-num_keys // tile_keys)
    useful = visible / visited if visited else 1.0
    return Tiles(keys_at, keys, queries_at, queries, full, partial, total - full - partial, useful)
