"""Lists of the tiles that attention visits on a GPU, made once a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gistkit import _gpu
from gistkit._compiled import planner as _planner
from gistkit.common.checks import moved

# Rows of queries and keys of a tile (csrc/common/attention.h).
TILE_QUERIES, TILE_KEYS = 128, 64
# A GPU makes lists itself up to so many tiles of the grid, which is the memory that entries take there, and so many
# lists of a side, in which the work of their order is quadratic. csrc/glue/cuda/tile_rows.h has the same bounds.
MOST_TILES, MOST_LISTS = 2**24, 2**17


@dataclass(frozen=True, eq=False)
class TileLists:
    """The form of a plan's spans that attention takes on a GPU.

    Args:
        of: the spans that the lists were made from.
        version: of `of` when they were made: a change in place makes lists worthless. None where none is counted.
        spans: int32 like `of`, in order, merged and within the keys.
        tiles: int32 [1 or 2, width]: lists of key tiles of query tiles, then of query tiles of key tiles, which
            gradients need (csrc/glue/cuda/tile_rows.h says how they lie in a row).
        stream: the CUDA stream that makes them; only work on it may rely on them. None: any stream that may read `of`.
    """

    of: Tensor
    version: int | None
    spans: Tensor
    tiles: Tensor
    stream: int | None = None

    def serve(self, spans: Tensor, gradient: bool) -> bool:
        """Whether they belong to these spans as they are now, on the current stream, and suffice for what is wanted."""
        return (
            self.of is spans
            and self.version == version_of(spans)
            and (not gradient or self.tiles.shape[0] == 2)
            and (self.stream is None or self.stream == _gpu.stream_of(spans))
        )


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None for one made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def made_on_gpu(spans: Tensor, num_keys: int, gradient: bool) -> bool:
    """Whether the lists of spans [B or 1, Nq, S, 2] on a GPU, of both sides or of queries, are made there.

    That waits for nothing.
    """
    batch, rows, _, _ = spans.shape
    query_tiles, key_tiles = max(1, -(-rows // TILE_QUERIES)), max(1, -(-num_keys // TILE_KEYS))
    lists = max(query_tiles, key_tiles) if gradient else query_tiles
    return batch * lists <= MOST_LISTS and batch * query_tiles * key_tiles <= MOST_TILES


def lists_on(spans: Tensor, num_keys: int, there: Tensor) -> TileLists:
    """Lists of spans [B or 1, Nq, S, 2] on the CPU, moved to the device of `there`, a copy of these spans.

    Their memory is proportional to the tiles visited.
    """
    host = np.ascontiguousarray(spans.numpy())
    normalized, tiles = (torch.from_numpy(array) for array in _planner.lists(host, num_keys))
    same = torch.equal(normalized, spans)
    return TileLists(
        of=there,
        version=version_of(there),
        spans=there if same else moved(normalized, there.device),
        tiles=moved(tiles, there.device),
    )
