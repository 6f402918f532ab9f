"""Loads the compiled op library; errors say what to do if it cannot be loaded."""

import ctypes
import os
import platform
from pathlib import Path

import torch

from gistkit._compiled import INSTALL_AGAIN
from gistkit.ops._private import has_cuda_kernel, op_names

PACKAGE = Path(__file__).resolve().parent.parent
# In the order of the levels of csrc/cpu/isa.h.
_ARM = platform.machine() in ("aarch64", "arm64")
ISA_NAMES: tuple[str, ...] = ("generic", "neon") if _ARM else ("generic", "avx2", "avx512", "avx512_bf16", "amx")


def _find(stem: str) -> tuple[Path | None, list[Path]]:
    """Where lib{stem}.so is, if anywhere, and the folders that were searched."""
    import importlib.util

    # An editable install keeps compiled files in site-packages, away from the sources: the finder knows where.
    spec = importlib.util.find_spec("gistkit")
    roots = [PACKAGE, *map(Path, spec.submodule_search_locations or [])] if spec else [PACKAGE]
    paths = [root / f"lib{stem}.so" for root in roots]
    return next((path for path in paths if path.exists()), None), roots


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"gistkit found its op library but could not load it ({path.name}, torch {torch.__version__}): {error}. It "
            f"was probably built for another torch or Python: {INSTALL_AGAIN}."
        ) from error


def _load_ops() -> Path:
    path, roots = _find("gistkit_ops")
    if path is None:
        raise ImportError(
            f"gistkit's compiled op library libgistkit_ops.so is missing (looked in {', '.join(map(str, roots))}): "
            f"{INSTALL_AGAIN}."
        )
    _load(path)
    return path


def _load_cuda() -> str:
    """Loads the CUDA library where torch has CUDA, and describes the outcome."""
    path, _ = _find("gistkit_cuda")
    record = OPS_LIBRARY.with_name("cuda_build.txt")
    built = record.read_text().strip() if record.exists() else "not built (the build left no record of why)"
    if path is None or torch.version.cuda is None:
        return built if path is None else f"{built}; not loaded: this torch has no CUDA"
    _load(path)
    return f"{built}; {path}"


OPS_LIBRARY = _load_ops()
_handle = ctypes.CDLL(str(OPS_LIBRARY))
CUDA_LIBRARY = _load_cuda()


def _without_cuda(*_: object) -> None:
    raise RuntimeError(
        f"gistkit has no CUDA kernels here, and got CUDA tensors. CUDA library: {CUDA_LIBRARY}. Install again with "
        f"nvcc on PATH and GISTKIT_CUDA=ON, or move the tensors to the CPU."
    )


if has_cuda_kernel("gistkit::rope") is False:
    for name in op_names():
        if name.startswith("gistkit::"):
            torch.library.impl(name, "CUDA")(_without_cuda)


def best_isa() -> str:
    """Name of the best instruction set that this processor has and this build contains."""
    return ISA_NAMES[_handle.gistkit_cpu_best_isa()]


def cpu_isa(name: str | None = None) -> str:
    """Name of the instruction set the CPU kernels use; with `name`, chooses it first.

    They are "generic", "avx2", "avx512", "avx512_bf16" and "amx" on x86-64, each with all before it, and "generic" and
    "neon" on arm64. The last two of x86-64 change only attention in bfloat16: they use native bfloat16 matmuls and
    round weights to bfloat16 before the product with values, as on a GPU. Linux is asked for AMX's registers at their
    first use; if it refuses them, "avx512_bf16" takes their place.

    Raises:
        ValueError: if no set has this name, or this processor, system or build does not have it.
    """
    if name is None:
        return ISA_NAMES[_handle.gistkit_cpu_isa(-1)]
    if name not in ISA_NAMES:
        raise ValueError(f"cpu_isa: expected one of {', '.join(ISA_NAMES)}, got {name!r}")
    if _handle.gistkit_cpu_isa(ISA_NAMES.index(name)) < 0:
        raise ValueError(f"cpu_isa: this processor offers at most {best_isa()!r}, got {name!r}")
    return name


# The variable is read in C++ at first use, where an empty one is none; here a wrong value gets its message.
if chosen := os.environ.get("GISTKIT_ISA"):
    cpu_isa(chosen)
