"""What `--quick` leaves out of the tests, so that `make test` takes minutes; `make check` runs all.

Of a grid over instruction sets the best one runs in full, and every eighth case of the others. Most tests marked `slow`
have a quicker one beside them, on fewer cases or without a process of its own. Two things are left out whole: the CUDA
library's dry run (`tests/cuda/test_glue.py`) and the emulated kernels under sanitizers. Pages are looked at as text,
not in a browser.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

EVERY = 8
HEADER = """\
quick: every feature, on {best} in full and on other instruction sets every eighth case; no slow test, no browser,
no dry run of the CUDA library; make check runs all tests, lint and sanitizers"""


def instruction_set(item: pytest.Item) -> str | None:
    """The one that a test chooses by a fixture of `tests/conftest.py`."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("isa") or params.get("attention_isa")


def left_out_whole(item: pytest.Item) -> bool:
    """Whether a test is slow or needs a browser."""
    return item.get_closest_marker("slow") is not None or "chromium" in getattr(item, "fixturenames", ())


def quick(items: Sequence[pytest.Item], best: Sequence[str]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that run and those that are left out; `best`: the instruction sets whose cases all run."""
    chosen, left_out, cases = [], [], Counter[tuple[str, str]]()
    for item in items:
        isa = instruction_set(item)
        runs = not left_out_whole(item)
        if runs and isa is not None and isa not in best:
            case = (item.nodeid.split("[")[0], isa)
            runs = cases[case] % EVERY == 0
            cases[case] += 1
        (chosen if runs else left_out).append(item)
    return chosen, left_out
