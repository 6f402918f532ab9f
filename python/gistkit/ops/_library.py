"""Loads the compiled op library and says what to do when it cannot be loaded."""

import ctypes
import os
from pathlib import Path

import torch

from gistkit._compiled import INSTALL_AGAIN

PACKAGE = Path(__file__).resolve().parent.parent
ISA_NAMES = ("generic", "avx2", "avx512")


def _load(stem: str) -> Path:
    import importlib.util

    # An editable install keeps compiled files in site-packages, away from the sources: the finder knows where.
    spec = importlib.util.find_spec("gistkit")
    roots = [PACKAGE, *map(Path, spec.submodule_search_locations or [])] if spec else [PACKAGE]
    for root in roots:
        path = root / f"lib{stem}.so"
        if path.exists():
            try:
                torch.ops.load_library(path)
            except OSError as error:
                raise ImportError(
                    f"gistkit found its op library but could not load it ({path.name}, torch {torch.__version__}): "
                    f"{error}. It was probably built for another torch or Python: {INSTALL_AGAIN}."
                ) from error
            return path
    raise ImportError(
        f"gistkit's compiled op library lib{stem}.so is missing (looked in {', '.join(map(str, roots))}): "
        f"{INSTALL_AGAIN}."
    )


OPS_LIBRARY = _load("gistkit_ops")
_handle = ctypes.CDLL(str(OPS_LIBRARY))


def best_isa() -> str:
    """Name of the best instruction set that this processor has and this build contains."""
    return ISA_NAMES[_handle.gistkit_cpu_best_isa()]


def cpu_isa(name: str | None = None) -> str:
    """Name of the instruction set the CPU kernels use; with `name` ("generic", "avx2", "avx512"), chooses it first."""
    if name is None:
        return ISA_NAMES[_handle.gistkit_cpu_isa(-1)]
    if name not in ISA_NAMES:
        raise ValueError(f"cpu_isa: expected one of {', '.join(ISA_NAMES)}, got {name!r}")
    if _handle.gistkit_cpu_isa(ISA_NAMES.index(name)) < 0:
        raise ValueError(f"cpu_isa: this processor offers at most {best_isa()!r}, got {name!r}")
    return name


# The variable is read in C++ at first use; here a wrong value gets its message.
if "GISTKIT_ISA" in os.environ:
    cpu_isa(os.environ["GISTKIT_ISA"])
