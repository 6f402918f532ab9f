"""Builders: the functions that make methods' layouts, each with examples, which commands and pictures show."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from gistkit.layouts.layout import Layout

Build = TypeVar("Build", bound="Callable[..., Layout]")

BUILDERS: dict[str, Callable[..., Layout]] = {}
"""Each builder by its name; `example` adds one."""
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {}
"""{title: (name of a builder, its arguments for a layout that fits into a picture)}."""


def example(title: str, **arguments: Any) -> Callable[[Build], Build]:
    """Makes a function a builder, with an example; of several the lowest comes first."""

    def registered(build: Build) -> Build:
        BUILDERS[build.__name__] = build
        EXAMPLES[title] = build.__name__, arguments
        return build

    return registered
