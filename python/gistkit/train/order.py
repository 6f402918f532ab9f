"""A shuffle that is a function: where one number of an epoch goes, without the order of all others in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6


def shuffled(numbers: NDArray[np.int64], count: int, *key: int) -> NDArray[np.int64]:
    """Where a permutation of 0 to count - 1, one for each key, puts some of these numbers.

    A Feistel network over the next power of 4; what falls after `count` goes through it again. The same in every
    process and on every machine.

    Args:
        numbers: int64 [n], each from 0 to count - 1.
        count: 1 to 2**62.
        key: such as the seed and the epoch, each at least 0.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    places = np.atleast_1d(numbers).astype(np.uint64)
    outside = np.ones(len(places), bool)
    while outside.any():
        left, right = places[outside] >> half, places[outside] & mask
        for each in keys:
            left, right = right, left ^ (_mixed(right ^ each) & mask)
        places[outside] = left << half | right
        outside = places >= np.uint64(count)
    return places.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, whose every bit depends on all."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
