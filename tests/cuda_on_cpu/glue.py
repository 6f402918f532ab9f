"""A copy of the package whose op library is the CUDA one: kernels, launchers and glue, on CPU tensors.

    package = glue.package()        # a folder for sys.path, made once for each state of the sources
    glue.run(code, *arguments)      # Python code in a process of its own, after `import glue; glue.start()`

In that process ops on CPU tensors go through the door, the dispatcher, autograd and the CUDA glue to kernels under the
emulator; `calls()` tells what was launched and asked of the runtime, and `dry(True)` leaves launches out.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import emulation
import torch
from emulation import BUILD, FOLDER, ROOT

TORCH = Path(torch.__file__).resolve().parent
# The ABI that CMakeLists.txt names.
STABLE = ("-DTORCH_STABLE_ONLY", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA")
GLUE = [path for folder in ("csrc/glue", "csrc/glue/cuda") for path in (ROOT / folder).glob("*.cpp")]
KERNELS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/cuda").glob("*/*.cu"))
# What the package asks its library besides ops.
OTHERS = ("csrc/cpu/isa.cpp",)


def library() -> Path:
    """The op library, of which only the kernels' sources know that they run on a CPU."""
    emulator, _ = emulation._emulator()
    torch_flags = [*STABLE, f"-isystem{TORCH / 'include'}", "-Wno-attributes"]
    objects = [emulation._object(source, emulation.kernel_flags(checked=False)) for source in KERNELS]
    # What compiles soonest, for it allocates and checks: one unit, which reads torch's headers once.
    sources = sorted(path for path in [*GLUE, ROOT / FOLDER / "emulator/torch.cpp"] if path.stem != "register")
    unit = "".join(f'#include "{path}"\n' for path in sources)
    objects.append(emulation._object(emulation.written("glue", unit), ["-O0", *torch_flags]))
    objects += [emulation._object(source, ["-O0"]) for source in OTHERS]
    torch_libraries = [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    return emulation._link("gistkit_ops", objects, [str(emulator), f"-Wl,-rpath,{BUILD}", *torch_libraries])


def package() -> Path:
    """A folder with a package gistkit: the Python sources and the planner that are imported here, and `library()`."""
    import gistkit
    from gistkit import _planner

    ops, source = library(), Path(gistkit.__file__).parent
    files = sorted(path for path in source.rglob("*.py") if path.is_file())
    key = hashlib.sha256(ops.name.encode())
    for path in (*files, Path(_planner.__file__)):
        key.update(path.read_bytes())

    def copy(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for path in files:
            to = folder / "gistkit" / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
        shutil.copy(_planner.__file__, folder / "gistkit")
        shutil.copy(ops, folder / "gistkit" / "libgistkit_ops.so")

    return emulation.once(BUILD / f"package-{key.hexdigest()[:24]}", copy)


def run(code: str, *arguments: str, timeout: float = 600) -> str:
    """What Python code prints in a process where `gistkit` is that package."""
    path = os.pathsep.join([str(package()), str(ROOT / FOLDER)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", f"import glue; glue.start()\n{code}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"the process ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def start() -> None:
    """To be called first in that process: CPU tensors are taken for a GPU's, whose values nobody looks at."""
    # An editable install would be found before the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "gistkit" not in type(finder).__module__]
    import gistkit
    from gistkit import _gpu

    assert Path(gistkit.__file__).parents[1].name.startswith("package-"), gistkit.__file__
    _gpu.on_gpu = lambda tensor: True
    _gpu.has_values = lambda tensor: False
    _gpu.capturing = lambda: False
    _gpu.stream_of = lambda tensor: 0


def _loaded() -> ctypes.CDLL:
    emulator = emulation._emulator()[1]
    emulator.gistkit_emulator_calls.restype = ctypes.c_char_p
    return emulator


def calls() -> collections.Counter[str]:
    """How often what was called since the last time: "launch NAME" and "call NAME"."""
    counts: collections.Counter[str] = collections.Counter()
    for line in _loaded().gistkit_emulator_calls().decode().splitlines():
        name, count = line.rsplit(" ", 1)
        counts[name] += int(count)
    return counts


def dry(on: bool) -> None:
    """Launches are counted, and nothing runs: results are whatever memory holds."""
    _loaded().gistkit_emulator_dry(int(on))
