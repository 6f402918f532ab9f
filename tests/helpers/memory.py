"""The memory that a piece of code takes at its peak, and the tensors that its operations make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gistkit.inspect.recorder import ATTENTION


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


class Made(TorchDispatchMode):
    """`sizes`: the numbers in each tensor that operations made; `calls`: rows and keys of each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.calls: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **kwargs or {})
        new = (one for one in tree_leaves(out) if isinstance(one, Tensor))
        self.sizes += [one.numel() for one in new if one.untyped_storage().data_ptr() not in given]
        if func.name() == ATTENTION:
            self.calls.append((len(args[0]), args[1].shape[2]))
        return out
