"""Results whose bits must not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def assert_same_for_any_number_of_threads(run: Callable[[], Iterable[Tensor]]) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(list(run()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for number, (a, b) in enumerate(zip(results[0], other, strict=True)):
            assert torch.equal(a, b), f"result {number}"
