"""Loads the compiled op library; errors say what to do where it cannot be loaded."""

import ctypes
import os
import platform
from pathlib import Path

import torch

from gistkit._compiled import INSTALL_AGAIN

PACKAGE = Path(__file__).resolve().parent.parent
# In the order of the levels of csrc/cpu/isa.h.
_ARM = platform.machine() in ("aarch64", "arm64")
ISA_NAMES: tuple[str, ...] = ("generic", "neon") if _ARM else ("generic", "avx2", "avx512")


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


if not torch._C._dispatch_has_kernel_for_dispatch_key("gistkit::rope", "CUDA"):
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("gistkit::"):
            torch.library.impl(name, "CUDA")(_without_cuda)


def best_isa() -> str:
    """Name of the best instruction set that this processor has and this build contains."""
    return ISA_NAMES[_handle.gistkit_cpu_best_isa()]


def cpu_isa(name: str | None = None) -> str:
    """Name of the instruction set the CPU kernels use; with `name`, chooses it first.

    They are "generic", "avx2" and "avx512" on x86-64, and "generic" and "neon" on arm64.
    """
    if name is None:
        return ISA_NAMES[_handle.gistkit_cpu_isa(-1)]
    if name not in ISA_NAMES:
        raise ValueError(f"cpu_isa: expected one of {', '.join(ISA_NAMES)}, got {name!r}")
    if _handle.gistkit_cpu_isa(ISA_NAMES.index(name)) < 0:
        raise ValueError(f"cpu_isa: this processor offers at most {best_isa()!r}, got {name!r}")
    return name


def cpu_amx(on: bool | None = None) -> bool | None:
    """Whether the CPU's attention multiplies bfloat16 on AMX tiles, where `cpu_isa` is "avx512"; `on` chooses it first.

    Weights then are rounded to bfloat16 before they meet values, as on a GPU. None where there is no AMX: not in the
    processor, not allowed by the system, or not in this build. GISTKIT_AMX=0 turns it off; Linux is asked for its
    registers at the first use.

    Raises:
        ValueError: if AMX is to be turned on where there is none.
    """
    state = _handle.gistkit_cpu_amx(-1 if on is None else int(on))
    if state < 0:
        if on:
            raise ValueError("cpu_amx: expected False or None, this processor, system or build has no AMX, got True")
        return None
    return bool(state)


# The variables are read in C++ at first use; here a wrong value gets its message.
if "GISTKIT_ISA" in os.environ:
    cpu_isa(os.environ["GISTKIT_ISA"])
if os.environ.get("GISTKIT_AMX", "1") not in ("0", "1"):
    raise ValueError(f"GISTKIT_AMX: expected 0 or 1, got {os.environ['GISTKIT_AMX']!r}")
