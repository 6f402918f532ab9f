"""What is installed, what was built and what is missing: `python -m gistkit.info`."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import gistkit
from gistkit.ops import best_isa, cpu_isa
from gistkit.ops._library import OPS_LIBRARY

TORCH_ABI_TARGET = "2.11"
OPTIONAL = {
    "transformers": "hf",
    "safetensors": "hf",
    "matplotlib": "viz",
    "tqdm": "demo",
}


def processor() -> str:
    """Name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> dict[str, str | int]:
    """The machine and versions that a result was made with."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "instruction_set": cpu_isa(),
        "gistkit": gistkit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cuda_library() -> str:
    """Whether the CUDA library was built, and why not."""
    record = OPS_LIBRARY.with_name("cuda_build.txt")
    return record.read_text().strip() if record.exists() else "not built (no record of why: the build left none)"


def lines() -> list[str]:
    """The report, a line an item."""
    report = [f"{name:16} {value}" for name, value in machine().items()]
    report.append(f"{'best available':16} {best_isa()}")
    report.append(f"{'op library':16} {OPS_LIBRARY} (stable ABI of torch {TORCH_ABI_TARGET})")
    found = importlib.util.find_spec("gistkit._planner")
    report.append(f"{'planner':16} {found.origin if found else 'missing: install gistkit again'}")
    report.append(f"{'CUDA library':16} {cuda_library()}")
    for package, extra in OPTIONAL.items():
        try:
            report.append(f"{package:16} {version(package)}")
        except PackageNotFoundError:
            report.append(f"{package:16} missing: pip install 'gistkit[{extra}]'")
    return report


def main() -> None:
    """Prints the report."""
    argparse.ArgumentParser(
        prog="python -m gistkit.info", description=__doc__, epilog="example: GISTKIT_ISA=avx2 python -m gistkit.info"
    ).parse_args()
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
