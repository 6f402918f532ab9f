"""The launchers of kernels/primitives.cu and kernels/hopper.cu on arrays: emulated, or built with nvcc for a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emulation
import numpy as np
import torch
from torch import Tensor

SOURCES = ("tests/cuda_on_cpu/kernels/primitives.cu", "tests/cuda_on_cpu/kernels/hopper.cu")
Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Mapping[str, Tensor]

# In the order of the enum Function.
FUNCTIONS = ("opaque", "exp2_fast", "pack<BFloat16>", "pack<Float16>", "unpack<BFloat16>", "unpack<Float16>")
FUNCTIONS += ("expf", "logf", "tanhf", "fmaxf", "fmaf", "__fdividef")


def _mirror(name: str, fields: str, numbers: str = "", strides: str = "") -> type[ctypes.Structure]:
    """A params struct: pointers, 64-bit integers, 32-bit integers."""
    return emulation.mirror(name, (fields, ctypes.c_void_p), (strides, ctypes.c_int64), (numbers, ctypes.c_int32))


PARAMS = {
    "elementwise": _mirror("ElementwiseParams", "words out", "count function"),
    "store": _mirror("StoreParams", "words places out"),
    "copy": _mirror("CopyParams", "source copies out"),
    "copy_groups": _mirror("CopyGroupsParams", "source out", "newest"),
    "load_matrix": _mirror("LoadMatrixParams", "elements rows out"),
    "product_bfloat16": _mirror("ProductParams", "a b c out"),
    "shared_memory": _mirror("SharedMemoryParams", "out source", "bytes"),
    "collectives": _mirror("CollectivesParams", "values out"),
}
_PRODUCT = "columns bfloat16 registers transpose_a transpose_b accumulate start_a start_b lead"
HOPPER = {
    "mbarrier": _mirror("MbarrierParams", "source out"),
    "bulk_copy": _mirror("BulkCopyParams", "source out", "from to bytes"),
    "bulk_addition": _mirror("BulkAddParams", "first terms out"),
    "tensor_loads": _mirror(
        "TensorCopyParams",
        "tensor box out",
        "batch heads length dim box_rows x y z w",
        "batch_stride head_stride row_stride",
    ),
    "shared_words": _mirror("SharedWordsParams", "words out"),
    "store_matrix": _mirror("StoreMatrixParams", "words rows out"),
    "named_barriers": _mirror("WarpRolesParams", "values out"),
    "turns": _mirror("TurnsParams", "values out"),
    "warpgroup_product": _mirror("WarpgroupProductParams", "a b c out", _PRODUCT),
    "warpgroup_groups": _mirror("WarpgroupGroupsParams", "a out"),
}
STRUCTS = tuple(
    (f"kernels/{header}.h", f"gistkit::cuda::{kind.__name__}", kind)
    for header, kinds in (("primitives", PARAMS), ("hopper", HOPPER))
    for kind in kinds.values()
)
PARAMS |= HOPPER
PARAMS["tensor_stores"] = PARAMS["tensor_loads"]
PARAMS["registers_of_warpgroups"] = PARAMS["named_barriers"]
PARAMS["load_matrix_transposed"] = PARAMS["load_matrix"]
PARAMS["product_float16"] = PARAMS["product_bfloat16"]


def nvcc() -> str | None:
    """The compiler that CMake would find."""
    folders = [str(Path(os.environ["CUDA_HOME"]) / "bin")] if "CUDA_HOME" in os.environ else []
    return shutil.which("nvcc", path=os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]))


@functools.cache
def _device_library() -> emulation.Library:
    major, minor = torch.cuda.get_device_capability()
    path = emulation.ROOT / "build" / "cuda_on_gpu" / f"libprimitives_sm{major}{minor}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    architecture = f"sm_{major}{minor}{'a' * (major == 9)}"
    command = [str(nvcc()), "-std=c++20", f"-arch={architecture}", "-Icsrc", f"-I{emulation.FOLDER}"]
    command += ["-shared", "-Xcompiler", "-fPIC", *SOURCES, "-o", str(path)]
    built = subprocess.run(command, cwd=emulation.ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return emulation.load(path)


class Backend:
    """Where launchers run; a subclass says how."""

    def run(self, launcher: str, out: Array, **given: Array | int) -> Array:
        """What the launcher makes of `given`, in an array like `out`; all its bits are set before."""
        numbers = {name: x for name, x in given.items() if isinstance(x, int)}
        tensors = {name: _bytes(x) for name, x in given.items() if not isinstance(x, int)}
        result = torch.full((out.nbytes,), 0xFF, dtype=torch.uint8)
        found = self._launch(launcher, tensors, result, numbers)
        return found.numpy().view(out.dtype).reshape(out.shape)

    def _launch(self, launcher: str, tensors: Tensors, out: Tensor, numbers: Mapping[str, int]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Emulated(Backend):
    """Under the emulator: one of its builds, and an order of threads."""

    checked: bool = False
    order: str = "forward"
    defines: tuple[str, ...] = ()

    def _launch(self, launcher: str, tensors: Tensors, out: Tensor, numbers: Mapping[str, int]) -> Tensor:
        library = emulation.build("primitives", SOURCES, checked=self.checked, defines=self.defines, structs=STRUCTS)
        params = _params(launcher, {**tensors, "out": out}, numbers)
        library.run(f"gistkit::cuda::{launcher}", params, inputs=tensors, outputs={"out": out}, order=self.order)
        return out


class Device(Backend):
    """On the GPU."""

    def _launch(self, launcher: str, tensors: Tensors, out: Tensor, numbers: Mapping[str, int]) -> Tensor:
        there = {name: x.cuda() for name, x in {**tensors, "out": out}.items()}
        params = _params(launcher, there, numbers)
        torch.cuda.synchronize()
        error = _device_library().function(f"gistkit::cuda::{launcher}")(ctypes.byref(params), None)
        assert error == 0, f"{launcher} returned cudaError_t {error}"
        torch.cuda.synchronize()
        return there["out"].cpu()


def _bytes(array: Array) -> Tensor:
    # A clone begins at a multiple of 16 bytes, which an array need not.
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).ravel()).clone()


def _params(launcher: str, tensors: Tensors, numbers: Mapping[str, int]) -> ctypes.Structure:
    return PARAMS[launcher](**{name: x.data_ptr() for name, x in tensors.items()}, **numbers)
