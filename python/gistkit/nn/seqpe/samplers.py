"""Random positions for SeqPE: windows outside the training range, starts of sequences, pivots with candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gistkit.common.checks import check_int

# Confusions that are tried for each that is wanted: some are the pivot, out of range, or nearer than a uniform draw.
TRIES = 4


class Sampler:
    """A sampler with its own generator, which may be set to the draws of a step."""

    def __init__(self, axes: int, max_position: int, seed: int) -> None:
        check_int("axes", axes, 1)
        check_int("max_position", max_position, 2)
        if max_position ** max(axes, 2) > 2**62:
            raise ValueError(
                f"max_position: expected at most {int(2 ** (62 / max(axes, 2)))} on {axes} axes, as positions are "
                f"numbered and their distances squared in int64, got {max_position}"
            )
        self.axes, self.max_position, self.seed = axes, max_position, seed
        self._generator = torch.Generator().manual_seed(seed)

    def seek(self, step: int) -> None:
        """Makes the next draw that of a step, whatever was drawn before."""
        check_int("step", step, 0)
        (state,) = np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint64) >> np.uint64(1)
        self._generator.manual_seed(int(state))

    def _below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def _chance(self, rate: float, count: int) -> Tensor:
        """bool [count], True at this rate."""
        return torch.rand(count, generator=self._generator) < rate

    def _distinct(self, rows: int, count: int, size: int) -> Tensor:
        """[rows, count] numbers below `size`, in each row uniform without replacement."""
        if size <= 4 * count:
            return torch.rand(rows, size, generator=self._generator).argsort(1)[:, :count]
        drawn = self._below(size, rows, count)
        while (again := repeated(drawn)).any():
            drawn[again] = self._below(size, int(again.sum()))
        return drawn

    def _shifts(self, shape: Sequence[int], count: int) -> Tensor:
        """[count, axes], uniform; a window of this shape stays below max_position."""
        return torch.stack([self._below(self.max_position - size, count) for size in shape], 1)

    def _shaped(self, positions: Tensor) -> Tensor:
        """Without the last dimension where there is one axis."""
        return positions[..., 0] if self.axes == 1 else positions


class WindowSampler(Sampler):
    """Positions of training's range with the same positions shifted, for `ood_loss`.

    Args:
        windows: shifts a draw.
        positions: m of a window, drawn from the range without replacement, for each window separately.
        shape: L of training, the positions on each axis; training's range is [0, L) on each.
        max_position: L_max; shifts are uniform in [0, L_max - L) on each axis.
        seed: of the generator.

    Paper: SeqPE, Section 3.4.
    """

    def __init__(
        self,
        windows: int,
        positions: int,
        shape: Sequence[int],
        max_position: int,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(len(shape), max_position, seed)
        check_int("windows", windows, 1)
        _check_shape(shape, max_position)
        if not 2 <= positions <= math.prod(shape):
            raise ValueError(f"positions: expected 2 to {math.prod(shape)}, all of training's range, got {positions}")
        self.windows, self.positions, self.shape = windows, positions, tuple(shape)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The teacher's and the student's positions, [W, m] or [W, m, axes] each."""
        index = self._distinct(self.windows, self.positions, math.prod(self.shape))
        teacher = torch.stack(torch.unravel_index(index, self.shape), -1)
        shift = self._shifts(self.shape, self.windows)
        return self._shaped(teacher), self._shaped(teacher + shift[:, None])


class StartSampler(Sampler):
    """Start positions of the sequences of a batch: most start at 0, some at random.

    Args:
        shape: L of training, the positions on each axis.
        max_position: L_max; random starts are uniform in [0, L_max - L) on each axis.
        rate: share of the sequences that begin at a random start.
        seed: of the generator.

    Paper: SeqPE, Appendix A.5.
    """

    def __init__(
        self,
        shape: Sequence[int],
        max_position: int,
        *,
        rate: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(len(shape), max_position, seed)
        _check_shape(shape, max_position)
        if not 0 <= rate <= 1:
            raise ValueError(f"rate: expected 0 to 1, got {rate!r}")
        self.shape, self.rate = tuple(shape), rate

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Starts [B, axes], 0 where a sequence is not shifted, and bool [B], whether it is."""
        check_int("batch_size", batch_size, 1)
        starts = self._shifts(self.shape, batch_size)
        shifted = self._chance(self.rate, batch_size)
        return starts.where(shifted[:, None], 0), shifted


class ContrastiveSampler(Sampler):
    """Pivots, uniform in [0, max_position) on each axis, with candidates for `contrastive_loss`.

    The candidates of a pivot are distinct, never the pivot itself, and of one of two kinds, chosen for each pivot:

    - global: uniform draws, and positions whose digits are easily confused with the pivot's: two digits swapped, one
      dropped or one added, on one axis; each farther from the pivot than the nearest uniform draw, so that the
      positive is among those. If too few such positions exist, uniform draws take their place.
    - local: uniform draws from one random window, which need not be near the pivot.

    Args:
        pivots: pivots a draw.
        candidates: C, for each pivot.
        max_position: L_max.
        axes: of a position.
        base: of the digits.
        seed: of the generator.
        confusions: of a global pivot; None: a quarter of C, as in the public code (the paper leaves it open).
        window: positions of a window, with at least one more than C; on several axes it is a cube of as many.

    Paper: SeqPE, Appendix A.2.
    """

    def __init__(
        self,
        pivots: int,
        candidates: int,
        max_position: int,
        *,
        axes: int = 1,
        base: int = 10,
        seed: int = 0,
        confusions: int | None = None,
        window: int = 256,
    ) -> None:
        super().__init__(axes, max_position, seed)
        check_int("pivots", pivots, 1)
        check_int("candidates", candidates, 2)
        check_int("base", base, 2)
        check_int("window", window, 1)
        confusions = candidates // 4 if confusions is None else confusions
        if not 0 <= confusions < candidates:
            raise ValueError(f"confusions: expected 0 to {candidates - 1} of {candidates} candidates, got {confusions}")
        if max_position**axes <= candidates:
            raise ValueError(
                f"max_position: expected more than {candidates} positions besides the pivot, "
                f"got {max_position} on {axes} axes"
            )
        self.pivots, self.candidates, self.base, self.confusions = pivots, candidates, base, confusions
        self.side = min(_root(max(window, candidates + 1), axes), max_position)
        # An edit may add a digit.
        self.powers = torch.tensor([base**place for place in range(_length(max_position - 1, base) + 2)])

    def draw(self) -> tuple[Tensor, Tensor]:
        """Pivots [P] and candidates [P, C], or [P, axes] and [P, C, axes]."""
        pivots = self._below(self.max_position, self.pivots, self.axes)
        everywhere = self._global(pivots)
        candidates = torch.where(self._chance(0.5, self.pivots)[:, None, None], everywhere, self._local(pivots))
        return self._shaped(pivots), self._shaped(candidates)

    def _local(self, pivots: Tensor) -> Tensor:
        start = self._below(self.max_position - self.side + 1, self.pivots, self.axes)
        inside = ((pivots >= start) & (pivots < start + self.side)).all(1)
        size = self.side**self.axes
        # Without one position of the window: the pivot, or any other where it is not inside.
        left_out = torch.where(inside, as_number(pivots - start, self.side), self._below(size, self.pivots))[:, None]
        drawn = self._distinct(self.pivots, self.candidates, size - 1)
        return start[:, None] + as_position(drawn + (drawn >= left_out), self.side, self.axes)

    def _global(self, pivots: Tensor) -> Tensor:
        pivot_numbers = as_number(pivots, self.max_position)[:, None]
        drawn = self._distinct(self.pivots, self.candidates, self.max_position**self.axes - 1)
        uniform = drawn + (drawn >= pivot_numbers)
        if not self.confusions:
            return as_position(uniform, self.max_position, self.axes)
        kept = self.candidates - self.confusions
        tried = self._confused(pivots, TRIES * self.confusions)
        limit = _distance(as_position(uniform[:, :kept], self.max_position, self.axes), pivots).amin(1, keepdim=True)
        usable = (tried < self.max_position).all(-1) & (_distance(tried, pivots) > limit)
        keys = as_number(tried.clamp(max=self.max_position - 1), self.max_position)
        keys = torch.where(usable, keys, -1 - torch.arange(keys.shape[1]))
        usable &= ~repeated(keys) & (keys[:, :, None] != uniform[:, None]).all(2)
        first = usable.argsort(dim=1, descending=True, stable=True)[:, : self.confusions]
        confused = torch.where(usable.gather(1, first), keys.gather(1, first), uniform[:, kept:])
        return as_position(torch.cat([uniform[:, :kept], confused], 1), self.max_position, self.axes)

    def _confused(self, pivots: Tensor, count: int) -> Tensor:
        """[P, count, axes]: each pivot with the digits of one axis edited, into anything."""
        shape = (len(pivots), count)
        axis = self._below(self.axes, *shape)
        # Unused: without these the seeds of earlier results would draw others.
        self._below(1, *shape)
        number = self._edited(pivots.gather(1, axis))
        return pivots[:, None].expand(*shape, -1).scatter(2, axis[..., None], number[..., None])

    def _edited(self, number: Tensor) -> Tensor:
        """One edit of each number: a swap of digits, a removal or an insertion."""
        places = (number[..., None] >= self.powers).sum(-1).clamp(min=1)
        first, second = (self._place(places) for _ in range(2))
        low, high = self.powers[first], self.powers[second]
        low_digit, high_digit = number // low % self.base, number // high % self.base
        swapped = number + (high_digit - low_digit) * low + (low_digit - high_digit) * high
        dropped = torch.where(places > 1, number // (low * self.base) * low + number % low, number)
        new = self._below(self.base, *number.shape)
        at = self.powers[self._place(places + 1)]
        added = (number // at * self.base + new) * at + number % at
        kind = self._below(3, *number.shape)[None]
        return torch.stack([swapped, dropped, added]).gather(0, kind)[0]

    def _place(self, places: Tensor) -> Tensor:
        """Uniform below `places`."""
        return (torch.rand(places.shape, generator=self._generator, dtype=torch.float64) * places).long()


def repeated(values: Tensor) -> Tensor:
    """bool as `values` [R, C]: equal to one before it in its row."""
    ordered, order = values.sort(dim=1, stable=True)
    again = torch.zeros_like(values, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, order, again)


def as_number(positions: Tensor, size: int) -> Tensor:
    """Positions [.., axes] below `size` on each axis as one number."""
    key = positions[..., 0]
    for axis in range(1, positions.shape[-1]):
        key = key * size + positions[..., axis]
    return key


def as_position(numbers: Tensor, size: int, axes: int) -> Tensor:
    """The inverse of `as_number`, [.., axes]."""
    return torch.stack([numbers // size**power % size for power in range(axes - 1, -1, -1)], -1)


def _check_shape(shape: Sequence[int], max_position: int) -> None:
    for size in shape:
        check_int("shape", size, 1)
        if size >= max_position:
            raise ValueError(f"max_position: expected more than training's {size} positions, got {max_position}")


def _distance(positions: Tensor, pivots: Tensor) -> Tensor:
    """Squared, of [P, C, axes] to [P, axes]."""
    return (positions - pivots[:, None]).square().sum(-1)


def _length(number: int, base: int) -> int:
    """Digits of a number."""
    digits = 1
    while number >= base:
        number //= base
        digits += 1
    return digits


def _root(size: int, axes: int) -> int:
    """The least side of a cube of at least `size` positions."""
    side = round(size ** (1 / axes))
    side -= side**axes >= size
    return side + (side**axes < size)
