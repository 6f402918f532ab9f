"""Which of a test's cases `make test` runs, and which `make check` alone."""

import pytest


def slow(*cases):
    """Cases that are left to `make check`."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def tiers(names, quick=("llama", "gemma3")):
    """Names, of which `make test` runs the quick ones."""
    return mostly_slow(names, *(name for name in names if name in quick))


def mostly_slow(cases, *first):
    """The cases of a test by their names, of which `make test` runs the first ones alone."""
    name = lambda case: str(getattr(case, "name", getattr(case, "__name__", case)))  # noqa: E731
    kept = set(map(name, first))
    assert kept <= set(map(name, cases))
    return [pytest.param(case, marks=() if name(case) in kept else pytest.mark.slow, id=name(case)) for case in cases]
