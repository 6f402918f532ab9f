"""Cases of a test that differ little: some for `make test`, all for `make check`."""

import pytest


def mostly_slow(cases, *first):
    """The cases of a test by their names, of which `make test` runs the first ones alone."""
    name = lambda case: str(getattr(case, "name", getattr(case, "__name__", case)))  # noqa: E731
    kept = set(map(name, first))
    assert kept <= set(map(name, cases))
    return [pytest.param(case, marks=() if name(case) in kept else pytest.mark.slow, id=name(case)) for case in cases]
