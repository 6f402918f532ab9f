"""Checks of arguments, and the padding of ragged rows.

Errors name the argument, what was expected and what came. In builders of layouts and in pictures the message starts
with the function's name (`at_least`, `one_of`, `widths`); elsewhere with the argument's (`check_int`, `check_float`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The label that losses skip, and that labels are padded with; torch and transformers use the same.
IGNORE = -100
# Position IDs, lengths and ranks are below it.
POSITIONS = 2**31


def at_least(function: str, name: str, value: int, low: int) -> int:
    """`value` as an int of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{function}: expected {name} to be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{function}: expected {name} >= {low}, got {value}")
    if value >= 2**62:
        raise ValueError(f"{function}: expected {name} < 2**62, got {value}")
    return int(value)


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


def check_int(name: str, value: Any, low: int = 1, high: float = math.inf, *, floats: bool = False) -> int:
    """`value` as an int of at least `low`, below `high`; with `floats` a float that is a whole number will do."""
    kind = isinstance(value, Real if floats else Integral) and not isinstance(value, bool)
    if not kind or not low <= value < high or value != int(value):
        limit = f" and < {high}" if kind and high <= value < math.inf else ""
        raise ValueError(f"{name}: expected a whole number >= {low}{limit}, got {value!r}")
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """`value`, True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def check_float(name: str, value: Any, low: float) -> float:
    """`value` as a finite float of at least `low`."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= float(value) < math.inf:
        raise ValueError(f"{name}: expected a number >= {low:g}, got {value!r}")
    return float(value)


def padded(rows: Sequence[Sequence[int]], fill: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Rows of ints as one tensor int64 [B, longest], with `fill` after the shorter ones."""
    array = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return moved(torch.from_numpy(array), device)


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on a device, which the host does not wait for where it comes from the CPU."""
    if tensor.is_cpu and tensor.is_pinned():
        # Other memory is read before this returns; this could be filled again meanwhile.
        tensor = tensor.clone()
    return tensor.to(device, non_blocking=tensor.is_cpu)


def placed(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of numbers that the host knows, on a device, which the host does not wait for."""
    return moved(torch.as_tensor(values, dtype=dtype), device)
