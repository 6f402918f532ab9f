"""On which devices the bodies of the CUDA tests run: all of them on a GPU, some on the CPU, so that none is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gistkit import Plan
from gistkit.layouts import Links
from gistkit.nn import DigitTrie

# `-m gpu` chooses these.
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))
ON_CUDA = pytest.param("cuda", marks=GPU)


def gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test of what only a GPU has."""
    for mark in GPU:
        test = mark(test)
    return test


def grid(names: str, *axes: Iterable[Any], cpu: int = 1, here: str = "cpu", **options: Any) -> pytest.MarkDecorator:
    """Parametrizes `device` and `names`: all combinations on a GPU, about `cpu` of them on the CPU, called `here`.

    The CPU's own tests have the others. `options`: of pytest's parametrize.
    """
    every = list(product(*axes))
    # A step that shares no factor with the axes' lengths meets all values of each.
    step = max(1, len(every) // cpu)
    step += 1 - step % 2 if len(every) > cpu else 0
    found = [pytest.param(here, *case) for case in every[::step]]
    found += [pytest.param("cuda", *case, marks=GPU) for case in every]
    return pytest.mark.parametrize(f"device,{names}", found, ids=_id, **options)


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, tuple | torch.dtype) else None


def moved(value: Any, device: str) -> Any:
    """Tensors, plans and links, and tuples of them, on another device; everything else as it is."""
    if isinstance(value, Links):
        return Links(*(x.to(device) for x in value))
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor | Plan | DigitTrie) else value


def on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function computed on a device, for inputs and results on the CPU; gradients flow through."""

    def run(*inputs: Any, **options: Any) -> Any:
        found = function(*moved(inputs, device), **{name: moved(value, device) for name, value in options.items()})
        return moved(found, "cpu")

    return run


def assert_as_good(
    found: Iterable[Tensor], plain: Iterable[Tensor], exact: Iterable[Tensor], rounding: float | None = None
) -> None:
    """No error beyond twice that of plain torch in the same precision, both against float64, and a rounding.

    A compiler that contracts a product and a sum to one rounding, or sums in another order, stays within it. By default
    it is one of each result's own dtype.
    """
    for i, (mine, torchs, true) in enumerate(zip(found, plain, exact, strict=True)):
        assert mine.shape == true.shape and mine.dtype == torchs.dtype, i
        if not mine.numel():
            continue
        error, own = ((x.detach().double() - true.detach()).abs().max().item() for x in (mine, torchs))
        share = torch.finfo(mine.dtype).eps if rounding is None else rounding
        allowed = 2 * own + share * true.detach().abs().max().item()
        assert error <= allowed, f"result {i}: error {error:.2e}, allowed {allowed:.2e}"
