"""What the batches of a step are drawn from: the same for a seed and a step, whatever ran before."""

from __future__ import annotations

import numpy as np
import torch

# Seeds of the splits: training data, and the two held-out ones.
SPLITS = {"train": 0, "held_out": 1, "test": 2}
# Steps of a seed until its numbers would be those of the next one.
_STEPS = 100_003


def generator_of(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """What a step of a run is drawn from; `stream`: 0 or 1, for two that are independent of each other."""
    if step < _STEPS:
        number = (stream << 40) + _STEPS * (seed + 1) + step
    else:
        number = int(np.random.SeedSequence([stream, seed, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator().manual_seed(number)
