"""Which of a test's parameters `make test` runs, and which `make check` alone."""

import pytest


def slow(*cases):
    """Cases that are left to `make check`."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def tiers(names, quick=("llama", "gemma3")):
    """Names, of which `make test` runs the quick ones."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
