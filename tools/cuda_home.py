"""Prints the folder that CUDA_HOME needs for NVIDIA's packages of pip, with the two links that CMake looks for in it.

example: CUDA_HOME=$(python tools/cuda_home.py)
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def home(site: Path) -> Path | None:
    """The newest folder nvidia/cu* of site-packages with a compiler in it; lib64 and libcudart.so are linked there."""
    found = sorted(path.parents[1] for path in site.glob("nvidia/cu*/bin/nvcc"))
    if not found:
        return None
    runtime = next((found[-1] / "lib").glob("libcudart.so.*"))
    for link, target in ((found[-1] / "lib64", "lib"), (runtime.with_name("libcudart.so"), runtime.name)):
        if not link.exists():
            link.symlink_to(target)
    return found[-1]


if __name__ == "__main__":
    if (folder := home(Path(sysconfig.get_paths()["purelib"]))) is None:
        sys.exit("expected nvcc of the package nvidia-cuda-nvcc, got none; pip install nvidia-cuda-nvcc")
    print(folder)
