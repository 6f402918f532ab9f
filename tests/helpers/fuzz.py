"""How long tests with many random cases run: a slice in `make check`, GISTKIT_FUZZ cases in `make fuzz`."""

import os
import time
from collections.abc import Iterator

VARIABLE = "GISTKIT_FUZZ"


def rounds(few: int, *, seconds: float = 5.0, most: int | None = None) -> Iterator[int]:
    """Seeds from 0 on.

    Args:
        few: as many without GISTKIT_FUZZ, or fewer where `seconds` are over.
        most: the most with it.
    """
    count = os.environ.get(VARIABLE)
    if count is not None:
        yield from range(int(count) if most is None else min(int(count), most))
        return
    end = time.monotonic() + seconds
    for seed in range(few):
        if time.monotonic() > end:
            return
        yield seed
