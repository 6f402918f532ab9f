"""Intervals of means over questions, and of the differences of two readers that answered the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 4000


class Interval(NamedTuple):
    """A mean and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float], groups: Sequence[int]) -> Interval:
    """The mean of values, with the interval of the percentile bootstrap over groups.

    Questions about one context are right or wrong together, as the memory is one: contexts are drawn, not questions.
    The interval of a difference is that of the single differences, so pass these.

    Args:
        values: one for each question.
        groups: the number of each question's context.

    Raises:
        ValueError: if there is no value, or not one group for each.
    """
    array = np.asarray(values, dtype=np.float64)
    ids = np.asarray(groups)
    if not len(array) or len(ids) != len(array):
        raise ValueError(f"values: expected at least one, with a group each, got {len(array)} and {len(ids)}")
    _, place = np.unique(ids, return_inverse=True)
    sums, sizes = np.bincount(place, array), np.bincount(place)
    drawn = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), DRAWS)
    low, high = np.percentile((drawn @ sums) / (drawn @ sizes), (2.5, 97.5))
    return Interval(float(sums.sum() / len(array)), float(low), float(high))
