"""The trie of the digits of positions: what a causal encoder of digits computes once for positions that share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gistkit._compiled import planner as _planner


class Links(NamedTuple):
    """Rows of indices, and the same entries by what they point to.

    rows: int32 [N, M], -1 where there is none. Entry n M + m is that of row n, column m; those that point to v are
    entries[offsets[v] : offsets[v + 1]], ascending.
    """

    rows: Tensor
    entries: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class DigitTrie:
    """Distinct prefixes of the digits of positions, most significant first, axis after axis.

    Its N nodes are numbered level by level, each level in the order of positions; last a leaf for each of the U
    distinct positions, which stands for the encoder's [CLS].

    Args:
        shape: of the positions it was made from, without their axes.
        levels: the first node of each level, and N; axes x digits + 2 numbers.
        symbols: int64 [R], the table rows (place x base + digit) that occur, ascending, and the leaves' own,
            axes x digits x base.
        paths: int32 [N, axes x digits + 1], for each node the indices into `symbols` from the root to itself, then -1.
        ancestors: as paths, of nodes.
        inverse: int64 [P], the distinct position that each position is; None where all are distinct and ascending.
    """

    shape: torch.Size
    levels: tuple[int, ...]
    symbols: Tensor
    paths: Tensor
    ancestors: Tensor
    inverse: Tensor | None

    @classmethod
    def of(cls, positions: Tensor, *, axes: int = 1, base: int = 10, digits: int = 5) -> DigitTrie:
        """The trie of positions, int32 or int64 on the CPU: [...] where there is one axis, [..., axes] otherwise.

        Raises:
            TypeError: positions that are not whole numbers.
            ValueError: a position outside 0 .. base^digits - 1, or a last dimension that is not `axes`.
        """
        rows = _rows(positions, axes)
        if rows.device.type != "cpu":
            raise ValueError(f"positions: expected a tensor on the CPU, got one on {rows.device}")
        planned = _planner.trie(rows.to(torch.int64).contiguous().numpy(), base, digits)
        paths, ancestors, levels, symbols, inverse = planned
        ordered = bool((inverse == np.arange(len(inverse))).all())
        return cls(
            shape=positions.shape if axes == 1 else positions.shape[:-1],
            levels=tuple(levels.tolist()),
            symbols=torch.from_numpy(symbols),
            paths=torch.from_numpy(paths),
            ancestors=torch.from_numpy(ancestors),
            inverse=None if ordered else torch.from_numpy(inverse),
        )

    @staticmethod
    def check(positions: Tensor, *, axes: int = 1, base: int = 10, digits: int = 5) -> tuple[int, ...]:
        """Raises what `of` would; returns the highest coordinate of each axis, -1 where there are no positions."""
        rows = _rows(positions, axes)
        if not rows.numel():
            return (-1,) * axes
        lowest, highest = (x.tolist() for x in rows.aminmax(dim=0))
        for outside in (min(lowest), max(highest)):
            if not 0 <= outside < base**digits:
                raise ValueError(
                    f"positions: expected 0 <= position < {base**digits} ({digits} digits of base {base}), "
                    f"got {outside}"
                )
        return tuple(highest)

    @property
    def nodes(self) -> int:
        return self.levels[-1]

    @property
    def first_leaf(self) -> int:
        return self.levels[-2]

    def to(self, device: torch.device | str) -> DigitTrie:
        """The same on a device."""
        tensors = (self.symbols, self.paths, self.ancestors)
        symbols, paths, ancestors = (x.to(device, non_blocking=True) for x in tensors)
        inverse = None if self.inverse is None else self.inverse.to(device, non_blocking=True)
        moved = DigitTrie(self.shape, self.levels, symbols, paths, ancestors, inverse)
        for name in ("path_links", "leaf_path_links", "ancestor_links", "leaf_ancestor_links"):
            links = Links(*(x.to(device, non_blocking=True) for x in getattr(self, name)))
            moved.__dict__[name] = links
        return moved

    @cached_property
    def path_links(self) -> Links:
        """Of all nodes, to symbols."""
        return _links(self.paths, len(self.symbols))

    @cached_property
    def leaf_path_links(self) -> Links:
        """Of the leaves, to symbols."""
        return _links(self.paths[self.first_leaf :], len(self.symbols))

    @cached_property
    def ancestor_links(self) -> Links:
        """Of all nodes, to nodes."""
        return _links(self.ancestors, self.nodes)

    @cached_property
    def leaf_ancestor_links(self) -> Links:
        """Of the leaves, to nodes."""
        return _links(self.ancestors[self.first_leaf :], self.nodes)


def _links(rows: Tensor, values: int) -> Links:
    entries, offsets = _planner.group(rows.contiguous().numpy(), values)
    return Links(rows, torch.from_numpy(entries), torch.from_numpy(offsets))


def _rows(positions: Tensor, axes: int) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions: expected an int32 or int64 tensor, got {got}")
    if axes > 1 and (positions.dim() == 0 or positions.shape[-1] != axes):
        raise ValueError(f"positions: expected [..., {axes}], a number for each axis, got {list(positions.shape)}")
    return positions.reshape(-1, axes)
