"""What the batches of a step are drawn from: the same for a seed and a step, whatever ran before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gistkit.train.data import Corpus

# Seeds of the splits: training data, and the two held-out ones.
SPLITS = {"train": 0, "held_out": 1, "test": 2}
# Steps of a seed until its numbers would be those of the next one.
_STEPS = 100_003


def measured(corpus: Corpus, length: int) -> dict[str, Corpus]:
    """ "held_out" and "test": the corpus with a half of its held-out text in place of all of it, at least so long."""
    splits = {name: replace(corpus, held_out=part) for name, part in corpus.splits().items()}
    for split in splits.values():
        split.check(length)
    return splits


def check_bytes(corpus: Corpus) -> None:
    """A ValueError unless a corpus is of bytes."""
    if corpus.tokenizer is not None:
        raise ValueError("corpus: expected one of bytes, got one that a tokenizer has made")


def seed_of(*numbers: int) -> int:
    """One seed for each list of numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator_of(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """What a step of a run is drawn from; `stream`: 0 or 1, for two that are independent of each other."""
    near = step < _STEPS
    return torch.Generator().manual_seed(
        (stream << 40) + _STEPS * (seed + 1) + step if near else seed_of(stream, seed, step)
    )
