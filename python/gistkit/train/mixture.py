"""Mixture: batches whose rows come from several sets, in shares of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gistkit.train.batches import Batch, Batches, check_size

# Rows in which every set has exactly its share, rounded.
BLOCK = 1000


class Mixture(Batches):
    """Batches whose rows come from several sets, of which each is read in its own order.

    Of every 1,000 rows on end each set has its share, rounded to a thousandth and at least one, in an order drawn from
    the seed. So `mixture(step)` depends only on the step, and so does the place in every set: a resumed run has the
    same rows.

    GistPool trains on mixtures of three datasets and tests on a fourth (Tables 8 and 9). It does not say how rows are
    drawn; equal shares are the default here.

    Args:
        sets: the batches of each set by name, of one row each (`size` 1); all of the same arguments, and of tokens.
        size: rows B of a batch.
        weights: shares by name, each above 0; their sum does not matter. None: equal ones.
        seed: at least 0.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self, sets: Mapping[str, Batches], size: int, weights: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        check_size(size, seed)
        if not 1 <= len(sets) <= BLOCK:
            raise ValueError(f"sets: expected 1 to {BLOCK}, got {len(sets)}")
        for name, batches in sets.items():
            if batches.size != 1:
                raise ValueError(f"sets[{name!r}]: expected batches of 1 row, got {batches.size}")
        weights = dict.fromkeys(sets, 1.0) if weights is None else weights
        if weights.keys() != sets.keys():
            raise ValueError(f"weights: expected one for each of {', '.join(sets)}, got {', '.join(weights)}")
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"weights[{name!r}]: expected a number above 0, got {weight}")
        self.sets = dict(sets)
        self.size = size
        self.seed = seed
        self.shares = dict(zip(sets, _rounded([weights[name] for name in sets], BLOCK), strict=True))
        self._block: tuple[int, np.ndarray] | None = None

    def held_out_rows(self, rows: int) -> list[Any]:
        """Held-out rows of every set, in its share of `rows`, at least one while there are as many."""
        counts = _rounded([self.shares[name] for name in self.sets], rows) if rows >= len(self.sets) else [1] * rows
        pairs = zip(self.sets.values(), counts, strict=False)
        return [row for batches, count in pairs for row in batches.held_out_rows(count)]

    def collate(self, rows: Sequence[Any]) -> Batch:
        """See `Batches.collate`; the sets have rows of one kind."""
        return next(iter(self.sets.values())).collate(rows)

    @property
    def identity(self) -> dict[str, Any]:
        """The sets' identities, the shares and the seed."""
        sets = {name: batches.identity for name, batches in self.sets.items()}
        return {"sets": sets, "shares": self.shares, "size": self.size, "seed": self.seed}

    def __getitem__(self, index: int) -> Any:
        """Row 0, 1, ... of all that are ever drawn."""
        block, place = divmod(index, BLOCK)
        order = self._order(block)
        which = int(order[place])
        name = list(self.sets)[which]
        return self.sets[name][block * self.shares[name] + int((order[:place] == which).sum())]

    def _order(self, block: int) -> np.ndarray:
        """The set of each row of a block, by its index; the last block is kept."""
        if self._block is None or self._block[0] != block:
            rows = np.repeat(np.arange(len(self.sets)), list(self.shares.values()))
            self._block = (block, np.random.default_rng([self.seed, block]).permutation(rows))
        return self._block[1]


def _rounded(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers of at least 1 with this sum, as near to the weights' shares as that allows."""
    whole = sum(weights)
    counts = [max(1, math.floor(total * weight / whole)) for weight in weights]
    # What is left goes to the largest remainders; what is too much is taken from the largest counts.
    while sum(counts) < total:
        index = max(range(len(counts)), key=lambda i: total * weights[i] / whole - counts[i])
        counts[index] += 1
    while sum(counts) > total:
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    return counts
