"""The memory that a piece of code takes at its peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def _resident(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def peak_bytes(function: Callable[[], object]) -> int:
    """How far the process's resident memory rises above what it has now; skips the test where none can tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the system does not reset its record of the peak")
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before
