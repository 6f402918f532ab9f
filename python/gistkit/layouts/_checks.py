"""Argument checks shared by the builders: errors that name the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral


def at_least(function: str, name: str, value: int, low: int) -> int:
    """`value` as an int of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{function}: expected {name} to be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{function}: expected {name} >= {low}, got {value}")
    if value >= 2**62:
        raise ValueError(f"{function}: expected {name} < 2**62, got {value}")
    return int(value)


def at_most_context(function: str, ratio: float, context: int) -> None:
    """Refuses a compression ratio that a context is too short for."""
    if ratio > context:
        raise ValueError(f"{function}: expected ratio <= {context}, the number of context tokens, got {ratio}")


def widths(function: str, windows: Iterable[int], window: int | None) -> dict[int, int]:
    """{asked: effective} widths of sliding windows; with `window`, which holds for all layers, the smaller of both."""
    if not isinstance(windows, Iterable) or isinstance(windows, str | bytes):
        raise TypeError(f"{function}: expected windows to be several ints, such as (512,), got {windows!r}")
    asked = sorted({at_least(function, "windows", width, 1) for width in windows})
    return {width: width if window is None else min(width, window) for width in asked}


def one_of(function: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Checks that `value` is among `choices`."""
    if value not in choices:
        raise ValueError(f"{function}: expected {name} to be one of {', '.join(choices)}, got {value!r}")
