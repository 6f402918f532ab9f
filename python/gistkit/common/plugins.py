"""What other distributions bring, found by entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any, cast


@cache
def _all() -> Any:
    # A scan reads a file of every installed distribution.
    return entry_points()


def brought(group: str) -> EntryPoints:
    """The entry points of a group."""
    return cast(EntryPoints, _all().select(group=group))
