"""Intervals of means over questions, and of the differences of two readers that answered the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000


class Interval(NamedTuple):
    """A mean and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def interval(
    values: Sequence[float],
    groups: Sequence[int] | None = None,
    *,
    weights: Sequence[float] | None = None,
    seed: int = 0,
) -> Interval:
    """The mean of values, with the interval of the percentile bootstrap over groups.

    Questions about one context are right or wrong together, as the memory is one: contexts are drawn, not questions.
    The interval of a difference is that of the single differences, so pass these.

    Args:
        values: one for each question.
        groups: the number of each question's context; None: each has its own.
        weights: of the values in the mean, such as the tokens of a loss; None: 1.
        seed: of the draws.

    Raises:
        ValueError: if there is no value, or not one group and weight for each.
    """
    array = np.asarray(values, dtype=np.float64)
    weight = np.ones_like(array) if weights is None else np.asarray(weights, dtype=np.float64)
    ids = np.arange(len(array)) if groups is None else np.asarray(groups)
    if not len(array) or len(ids) != len(array) or len(weight) != len(array):
        raise ValueError(
            f"values: expected at least one, with a group and a weight each, got {len(array)}, {len(ids)} and "
            f"{len(weight)}"
        )
    _, place = np.unique(ids, return_inverse=True)
    sums, sizes = (np.bincount(place, part) for part in (array * weight, weight))
    drawn = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), DRAWS)
    totals: NDArray[Any] = drawn @ sizes
    means = (drawn @ sums)[totals > 0] / totals[totals > 0]
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(sums.sum() / sizes.sum()), float(low), float(high))
