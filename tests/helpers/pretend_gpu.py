"""A GPU that is not there: tensors that say they are on one, keep their values on the CPU, and meet no others.

Inside `pretending()` what is made on the device "pretend", or moved there, is such a tensor. What a GPU would refuse is
refused: an operation on tensors of both devices, a NumPy array of one. Results are the CPU's. No CUDA code runs: what
is tested is the Python code around the ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"


class _Module:
    """What torch asks of a device's module."""

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Pretended(Tensor):
    """A tensor on the device, with its values on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Pretended:
        its = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=torch.device(NAME, 0), requires_grad=values.requires_grad,
        )  # fmt: skip
        its.values = values
        return its

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        if _WAITS is not None:
            _WAITS.append("tolist")
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.values.detach().numpy()
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    def storage(self) -> Any:
        return self.values.storage()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{NAME} {self.values!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


# Those that move data between devices, or take indices from the CPU.
_MAY_MIX = ("_to_copy", "copy_", "index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index", "lift_fresh")


# What the host has waited for inside `waits`, by the operation's name.
_WAITS: list[str] | None = None
_ANSWERS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2")


def _count(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], there: bool) -> None:
    if _WAITS is None:
        return
    tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
    on_gpu = [isinstance(x, Pretended) for x in tensors]
    if name in _ANSWERS and any(on_gpu):
        _WAITS.append(name)
    if name == "_to_copy" and on_gpu[0] != there and not kwargs.get("non_blocking"):
        _WAITS.append("to the GPU" if there else "to the CPU")
    if name == "copy_" and on_gpu[0] != on_gpu[-1] and not (len(args) > 2 and args[2]):
        _WAITS.append("copy_")
    if name in ("index", "index_put_", "_index_put_impl_") and any(on_gpu) and not all(on_gpu):
        _WAITS.append(f"{name} by the CPU's indices")


@contextmanager
def waits() -> Iterator[list[str]]:
    """Gives a list of what the host waits for inside: values that it asks for, copies that hold it up."""
    global _WAITS
    _WAITS = found = []
    try:
        yield found
    finally:
        _WAITS = None


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    wanted = kwargs.get("device")
    there = any(isinstance(x, Pretended) for x in tensors)
    if func.__name__.split(".")[0] not in _MAY_MIX and there:
        here = [x for x in tensors if not isinstance(x, Pretended) and x.dim()]
        if here:
            raise RuntimeError(f"{func}: expected all tensors on one device, got {NAME} and {here[0].device}")
    if wanted is not None:
        there = torch.device(wanted).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif "copy_" in func.__name__ or func.__name__.startswith("index"):
        there = isinstance(args[0], Pretended)
    _count(func.__name__.split(".")[0], args, kwargs, there)
    given = kwargs.get("generator")
    if there and given is not None and given.device.type == "cpu":
        raise RuntimeError(f"{func}: expected a {NAME!r} device type for generator but found 'cpu'")
    unwrap = lambda x: x.values if isinstance(x, Pretended) else x  # noqa: E731
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, dict(kwargs)))
    known = {id(x.values): x for x in tensors if isinstance(x, Pretended)}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or not there:
            return x
        # An operation in place gives its argument back.
        return known.get(id(x)) if id(x) in known else Pretended(x)

    return tree_map(wrap, result)


# When this is imported, which is before tests run: autograd counts devices once, at the first backward of the process.
# Beside a real GPU torch would take the pretended one for the process's accelerator.
REAL = torch.cuda.is_available()
if not REAL:
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


@contextmanager
def pretending() -> Iterator[str]:
    """Gives the device's name. Skips the test where there is a real GPU."""
    if REAL:
        pytest.skip("a GPU is there: nothing needs to be pretended")
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():
            yield NAME
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
