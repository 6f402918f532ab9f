"""Random pivots for SeqPE's contrastive loss, with the candidates that are told from each other."""

from __future__ import annotations

import torch
from torch import Tensor

from gistkit.nn.seqpe_losses import Form
from gistkit.nn.seqpe_samplers import Sampler, as_number, as_position, at_least, check_form, repeated

# Confusions that are tried for each that is wanted: some are the pivot, out of range, or nearer than a uniform draw.
TRIES = 4


class ContrastiveSampler(Sampler):
    """Pivots, uniform in [0, max_position) on each axis, with candidates for `contrastive_loss`.

    The candidates of a pivot are distinct, never the pivot itself, and of one of two kinds, chosen for each pivot:

    - global: uniform draws, and positions whose digits are easily confused with the pivot's: two digits swapped, one
      dropped or one added, on one axis; each farther from the pivot than the nearest uniform draw, so that the
      positive is among those. Where too few such positions exist, uniform draws stand instead.
    - local: uniform draws from one random window, which need not be near the pivot.

    Args:
        pivots: pivots a draw.
        candidates: C, for each pivot.
        max_position: L_max.
        axes: of a position.
        base: of the digits.
        seed: of the generator.
        form: "paper", or "reference" for the public code's mixture: 40% instead of half are global, confusions are one
            to three edits, substitutions among them, and a window has max(window, 5 C) positions.
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
        form: Form = "paper",
        confusions: int | None = None,
        window: int = 256,
    ) -> None:
        super().__init__(axes, max_position, seed)
        at_least("pivots", pivots, 1)
        at_least("candidates", candidates, 2)
        at_least("base", base, 2)
        at_least("window", window, 1)
        check_form(form)
        confusions = candidates // 4 if confusions is None else confusions
        if not 0 <= confusions < candidates:
            raise ValueError(f"confusions: expected 0 to {candidates - 1} of {candidates} candidates, got {confusions}")
        if max_position**axes <= candidates:
            raise ValueError(
                f"max_position: expected more than {candidates} positions besides the pivot, "
                f"got {max_position} on {axes} axes"
            )
        self.pivots, self.candidates, self.base, self.form = pivots, candidates, base, form
        self.confusions = confusions
        wanted = max(window, candidates + 1, 5 * candidates if form == "reference" else 0)
        self.side = min(_root(wanted, axes), max_position)
        self.global_share, self.edits, self.kinds = (0.4, 3, 4) if form == "reference" else (0.5, 1, 3)
        # Each edit may add a digit.
        self.powers = torch.tensor([base**place for place in range(_length(max_position - 1, base) + self.edits + 1)])

    def draw(self) -> tuple[Tensor, Tensor]:
        """Pivots [P] and candidates [P, C], or [P, axes] and [P, C, axes]."""
        pivots = self._below(self.max_position, self.pivots, self.axes)
        everywhere = self._global(pivots)
        found = torch.where(
            self._chance(self.global_share, self.pivots)[:, None, None], everywhere, self._local(pivots)
        )
        return self._shaped(pivots), self._shaped(found)

    def _local(self, pivots: Tensor) -> Tensor:
        start = self._below(self.max_position - self.side + 1, self.pivots, self.axes)
        inside = ((pivots >= start) & (pivots < start + self.side)).all(1)
        size = self.side**self.axes
        # Without one position of the window: the pivot, or any other where it is not inside.
        left_out = torch.where(inside, as_number(pivots - start, self.side), self._below(size, self.pivots))[:, None]
        drawn = self._distinct(self.pivots, self.candidates, size - 1)
        return start[:, None] + as_position(drawn + (drawn >= left_out), self.side, self.axes)

    def _global(self, pivots: Tensor) -> Tensor:
        own = as_number(pivots, self.max_position)[:, None]
        drawn = self._distinct(self.pivots, self.candidates, self.max_position**self.axes - 1)
        uniform = drawn + (drawn >= own)
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
        number = pivots.gather(1, axis)
        edits = 1 + self._below(self.edits, *shape)
        for edit in range(self.edits):
            number = torch.where(edit < edits, self._edited(number), number)
        return pivots[:, None].expand(*shape, -1).scatter(2, axis[..., None], number[..., None])

    def _edited(self, number: Tensor) -> Tensor:
        """One edit of each number: a swap of digits, a removal, an insertion or, the fourth kind, a substitution."""
        places = (number[..., None] >= self.powers).sum(-1).clamp(min=1)
        one, other = (self._place(places) for _ in range(2))
        low, high = self.powers[one], self.powers[other]
        digit, its = number // low % self.base, number // high % self.base
        swapped = number + (its - digit) * low + (digit - its) * high
        dropped = torch.where(places > 1, number // (low * self.base) * low + number % low, number)
        new = self._below(self.base, *number.shape)
        at = self.powers[self._place(places + 1)]
        added = (number // at * self.base + new) * at + number % at
        replaced = number + (new - digit) * low
        kind = self._below(self.kinds, *number.shape)[None]
        return torch.stack([swapped, dropped, added, replaced]).gather(0, kind)[0]

    def _place(self, places: Tensor) -> Tensor:
        """Uniform below `places`."""
        return (torch.rand(places.shape, generator=self._generator, dtype=torch.float64) * places).long()


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
