"""Random positions for SeqPE: windows outside of training's range, and where sequences begin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gistkit.nn.seqpe_losses import FORMS, Form


class Sampler:
    """A generator of its own, whose state can be kept, or set to that of a step."""

    def __init__(self, axes: int, max_position: int, seed: int) -> None:
        at_least("axes", axes, 1)
        at_least("max_position", max_position, 2)
        self.axes, self.max_position, self.seed = axes, max_position, seed
        self._generator = torch.Generator().manual_seed(seed)

    def seek(self, step: int) -> None:
        """Makes the next draw that of a step, whatever was drawn before."""
        at_least("step", step, 0)
        (state,) = np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint64) >> np.uint64(1)
        self._generator.manual_seed(int(state))

    def state_dict(self) -> dict[str, Tensor]:
        """What the next draws depend on."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on where the sampler that gave `state` was."""
        self._generator.set_state(state["generator"])

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
        positions: m of a window, without replacement out of the range, for each window anew.
        shape: L of training, the positions on each axis; training's range is [0, L) on each.
        max_position: L_max; shifts are uniform in [0, L_max - L) on each axis.
        seed: of the generator.
        form: "paper", or "reference", where windows begin at L / 4 at least (one axis), or beyond training's range on
            at least one axis (several axes).

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
        form: Form = "paper",
    ) -> None:
        super().__init__(len(shape), max_position, seed)
        at_least("windows", windows, 1)
        check_form(form)
        _check_shape(shape, max_position)
        if not 2 <= positions <= math.prod(shape):
            raise ValueError(f"positions: expected 2 to {math.prod(shape)}, all of training's range, got {positions}")
        self.windows, self.positions, self.shape, self.form = windows, positions, tuple(shape), form
        if form == "reference" and all(max_position - size <= self._least(size) for size in shape):
            raise ValueError(
                f"max_position: expected room for windows outside of training's range {list(shape)}, got {max_position}"
            )

    def draw(self) -> tuple[Tensor, Tensor]:
        """Teacher's positions and the student's, [W, m] or [W, m, axes] both."""
        index = self._distinct(self.windows, self.positions, math.prod(self.shape))
        teacher = torch.stack(torch.unravel_index(index, self.shape), -1)
        shift = self._shifts(self.shape, self.windows)
        if self.form == "reference":
            least = torch.tensor([self._least(size) for size in self.shape])
            while (inside := (shift < least).all(1)).any():
                shift[inside] = self._shifts(self.shape, int(inside.sum()))
        return self._shaped(teacher), self._shaped(teacher + shift[:, None])

    def _least(self, size: int) -> int:
        return size // 4 if self.axes == 1 else size


class StartSampler(Sampler):
    """Where the sequences of a batch begin: most at 0, some at a random start.

    Args:
        shape: L of training, the positions on each axis.
        max_position: L_max; random starts are uniform in [0, L_max - L) on each axis.
        rate: share of the sequences that begin at a random start.
        seed: of the generator.
        form: "paper": each sequence is shifted at this rate. "reference": each batch is, all of its sequences at once.

    Paper: SeqPE, Appendix A.5.
    """

    def __init__(
        self,
        shape: Sequence[int],
        max_position: int,
        *,
        rate: float = 0.1,
        seed: int = 0,
        form: Form = "paper",
    ) -> None:
        super().__init__(len(shape), max_position, seed)
        check_form(form)
        _check_shape(shape, max_position)
        if not 0 <= rate <= 1:
            raise ValueError(f"rate: expected 0 to 1, got {rate!r}")
        self.shape, self.rate, self.form = tuple(shape), rate, form

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Starts [B, axes], 0 where a sequence is not shifted, and bool [B], whether it is."""
        at_least("batch_size", batch_size, 1)
        starts = self._shifts(self.shape, batch_size)
        shifted = self._chance(self.rate, 1 if self.form == "reference" else batch_size).expand(batch_size)
        return starts.where(shifted[:, None], 0), shifted


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


def at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")


def _check_shape(shape: Sequence[int], max_position: int) -> None:
    for size in shape:
        at_least("shape", size, 1)
        if size >= max_position:
            raise ValueError(f"max_position: expected more than training's {size} positions, got {max_position}")
