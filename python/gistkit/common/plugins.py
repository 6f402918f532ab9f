"""What other distributions bring, found by entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoints, entry_points


@cache
def _all() -> EntryPoints:
    # A scan reads a file of every installed distribution.
    return entry_points()


def brought(group: str) -> EntryPoints:
    """The entry points of a group."""
    return _all().select(group=group)
