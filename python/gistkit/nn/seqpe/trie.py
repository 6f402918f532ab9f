"""The trie of the digits of positions: a causal encoder of digits computes each shared prefix once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gistkit._compiled import planner as _planner
from gistkit.common.checks import check_int
from gistkit.layouts.links import Links


@dataclass(frozen=True, eq=False)
class DigitTrie:
    """Distinct prefixes of the digits of positions, most significant first, axis after axis.

    Its N nodes are numbered level by level, each level in the order of positions; last a leaf for each of the U
    distinct positions, which stands for the encoder's [CLS].

    Args:
        code: axes, base, digits.
        shape: of the positions it was made from, without their axes.
        levels: the first node of each level, and N; axes x digits + 2 numbers.
        symbols: int64 [R], the table rows (place x base + digit) that occur, ascending, and the leaves' own,
            axes x digits x base.
        paths: rows int32 [N, axes x digits + 1], for each node the indices into `symbols` from the root to itself,
            then -1.
        leaf_paths: those of the leaves.
        ancestors: as paths, the indices of nodes.
        leaf_ancestors: those of the leaves.
        inverse: int64 [P], the distinct position that each position is; None where all are distinct and ascending.
    """

    code: tuple[int, int, int]
    shape: torch.Size
    levels: tuple[int, ...]
    symbols: Tensor
    paths: Links
    leaf_paths: Links
    ancestors: Links
    leaf_ancestors: Links
    inverse: Tensor | None

    @classmethod
    def of(cls, positions: Tensor, *, axes: int = 1, base: int = 10, digits: int = 5) -> DigitTrie:
        """The trie of positions, int32 or int64 on the CPU: [...] where there is one axis, [..., axes] otherwise.

        Raises:
            TypeError: positions that are not whole numbers.
            ValueError: a position outside 0 .. base^digits - 1, a last dimension that is not `axes`, a base below 2, or
                2^20 symbols (axes x digits x base) and more.
        """
        _check_code(axes, base, digits)
        rows = _rows(positions, axes)
        if rows.device.type != "cpu":
            raise ValueError(f"positions: expected a tensor on the CPU, got one on {rows.device}")
        planned = _planner.trie(rows.to(torch.int64).contiguous().numpy(), base, digits)
        paths, ancestors, levels, symbols, inverse = planned
        ordered = bool((inverse == np.arange(len(inverse))).all())
        first_leaf, nodes = levels[-2:].tolist()
        return cls(
            code=(axes, base, digits),
            shape=shape_of(positions, axes),
            levels=tuple(levels.tolist()),
            symbols=torch.from_numpy(symbols),
            paths=Links.grouped(paths, len(symbols)),
            leaf_paths=Links.grouped(paths[first_leaf:], len(symbols)),
            ancestors=Links.grouped(ancestors, nodes),
            leaf_ancestors=Links.grouped(ancestors[first_leaf:], nodes),
            inverse=None if ordered else torch.from_numpy(inverse),
        )

    @staticmethod
    def check(positions: Tensor, *, axes: int = 1, base: int = 10, digits: int = 5) -> None:
        """Raises what `of` would."""
        _check_code(axes, base, digits)
        rows = _rows(positions, axes)
        for outside in map(int, rows.aminmax() if rows.numel() else ()):
            if not 0 <= outside < base**digits:
                raise ValueError(
                    f"positions: expected 0 <= position < {base**digits} ({digits} digits of base {base}), "
                    f"got {outside}"
                )

    @property
    def nodes(self) -> int:
        return self.levels[-1]

    @property
    def first_leaf(self) -> int:
        return self.levels[-2]

    def to(self, device: torch.device | str) -> DigitTrie:
        """The same on a device."""

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        def moved_links(links: Links) -> Links:
            return Links(*map(moved, links))

        return replace(
            self,
            symbols=moved(self.symbols),
            paths=moved_links(self.paths),
            leaf_paths=moved_links(self.leaf_paths),
            ancestors=moved_links(self.ancestors),
            leaf_ancestors=moved_links(self.leaf_ancestors),
            inverse=None if self.inverse is None else moved(self.inverse),
        )


def shape_of(positions: Tensor, axes: int) -> torch.Size:
    """The shape of positions, without their axes."""
    return positions.shape if axes == 1 else positions.shape[:-1]


def _check_code(axes: int, base: int, digits: int) -> None:
    symbols = check_int("axes", axes) * check_int("base", base, 2) * check_int("digits", digits)
    if symbols >= 1 << 20:
        raise ValueError(
            f"base, digits: expected less than 2**20 symbols, got {symbols} of base {base}, {digits} digits and "
            f"{axes} axes"
        )


def _rows(positions: Tensor, axes: int) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions: expected an int32 or int64 tensor, got {got}")
    if axes > 1 and (positions.dim() == 0 or positions.shape[-1] != axes):
        raise ValueError(f"positions: expected [..., {axes}], a number for each axis, got {list(positions.shape)}")
    return positions.reshape(-1, axes)
