"""Builds the CPU's kernels for AArch64 and runs them on the host's tensors, under QEMU's user-mode emulation.

`Kernels` stands in for the library of `tests/cuda_on_cpu/emulation.py`, whose params structs both processors lay out
alike: what is written there to check a CUDA kernel then checks the CPU's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import attention_cases
import emulation
import pool_params
import rope_params
import torch
import trie_params

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm"
COMPILER = "aarch64-linux-gnu-g++"
OPS = ("attention", "pool", "rope", "trie")
ISAS = ("generic", "neon")  # in the order of their levels
MIRRORS = (*attention_cases.STRUCTS, *pool_params.STRUCTS, *rope_params.STRUCTS, *trie_params.STRUCTS)
STRUCTS = tuple(mirror for mirror in MIRRORS if mirror[0].startswith("common/"))
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-DGISTKIT_ARM64", "-Icsrc")


def emulator() -> str | None:
    """QEMU for AArch64, where it is installed: Debian has it with shared libraries and without."""
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def missing() -> str:
    """What has to be installed, or nothing."""
    packages = {"g++-aarch64-linux-gnu": shutil.which(COMPILER), "qemu-user": emulator()}
    return " ".join(package for package, found in packages.items() if not found)


def _sources() -> dict[str, str]:
    """Text of each translation unit, as CMake makes them."""
    units = [f"cpu/{op}/{op}.cpp" for op in OPS]
    sources = {Path(unit).stem: f'#include "{unit}"\n' for unit in (*units, "cpu/isa.cpp", "cpu/scratch.cpp")}
    template = (ROOT / "csrc/cpu/kernels.cpp.in").read_text()
    for op in OPS:
        for isa in ISAS:
            names = {"@ISA@": isa, "@VECTORS@": isa, "@OP@": op, "@KERNELS@": "kernels"}
            sources[f"{op}_{isa}"] = functools.reduce(lambda text, name: text.replace(*name), names.items(), template)
    # Compiled for what its assertions say of the structs' layouts there.
    sources["layout"] = emulation.layout_source(STRUCTS)
    return sources


def _compile(name: str, text: str) -> Path:
    """An object file, from `build/` when the same text was compiled before."""
    # Offsets in a derived struct are well defined where g++ computes them.
    command = [COMPILER, *FLAGS, *(["-Wno-invalid-offsetof"] if name == "layout" else []), "-x", "c++", "-"]

    def run(*options: str) -> bytes:
        result = subprocess.run([*command, *options], input=text.encode(), cwd=ROOT, capture_output=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{name} for AArch64:\n{result.stderr.decode()}")
        return result.stdout

    key = hashlib.sha256(b"\0".join([*(word.encode() for word in command), run("-E")])).hexdigest()[:24]
    return emulation.once(BUILD / f"{name}-{key}.o", lambda part: run("-c", "-o", str(part)))


@functools.cache
def driver() -> Path:
    """The program of `driver.cpp`, statically linked."""
    texts = {**_sources(), "driver": (Path(__file__).parent / "driver.cpp").read_text()}
    objects = [_compile(name, text) for name, text in texts.items()]
    key = hashlib.sha256("\0".join(map(str, objects)).encode()).hexdigest()[:24]
    link = [COMPILER, "-static", *map(str, objects), "-pthread", "-o"]
    return emulation.once(BUILD / f"driver-{key}", lambda part: subprocess.run([*link, str(part)], check=True))


def pointers(params: ctypes.Structure | ctypes.Array, base: int = 0) -> Iterator[tuple[int, int]]:
    """Offset and address of each pointer that is not null, in a struct and in what it holds."""
    if isinstance(params, ctypes.Array):
        size = ctypes.sizeof(params._type_)
        places = [(base + i * size, item) for i, item in enumerate(params)]
    else:
        fields = [(getattr(type(params), name).offset, kind, getattr(params, name)) for name, kind in params._fields_]
        for offset, kind, value in fields:
            if kind is ctypes.c_void_p and value:
                yield base + offset, value
        places = [(base + offset, value) for offset, _, value in fields]
    for place, value in places:
        if isinstance(value, ctypes.Structure | ctypes.Array):
            yield from pointers(value, place)


class _NoWorkspace:
    """What tells a CUDA launcher's working memory: the CPU's ops take their own."""

    def __call__(self, *_: object) -> int:
        return 0


class Kernels:
    """The ops with one instruction set."""

    def __init__(self, isa: str) -> None:
        self.level = ISAS.index(isa)

    def function(self, name: str) -> _NoWorkspace:
        return _NoWorkspace()

    def run(
        self,
        name: str,
        params: ctypes.Structure,
        *_: object,
        inputs: Mapping[str, torch.Tensor | None],
        outputs: Mapping[str, torch.Tensor | None],
        **__: object,
    ) -> None:
        """Calls the op of that name, less its namespaces. `inputs` and `outputs`: all that params points to."""
        arrays, written = [], []
        for tensors, is_output in ((inputs, 0), (outputs, 1)):
            for tensor in tensors.values():
                if tensor is not None and tensor.numel():
                    begin, size = emulation.memory_of(tensor)
                    arrays.append((begin, size, is_output))
                    written += [(begin, size)] * is_output
        text = name.rsplit("::", 1)[-1].encode()
        words = [struct.pack("q", len(text)), text, struct.pack("q", ctypes.sizeof(params)), bytes(params)]
        words.append(struct.pack("q", len(arrays)))
        for begin, size, is_output in arrays:
            words += [struct.pack("3q", is_output, begin % 64, size), ctypes.string_at(begin, size)]
        found = []
        for place, address in pointers(params):
            holders = [i for i, (begin, size, _) in enumerate(arrays) if begin <= address < begin + size]
            # An empty tensor's address leads nowhere, and may stay.
            found += [(place, holders[0], address - arrays[holders[0]][0])] if holders else []
        words += [struct.pack("q", len(found)), *(struct.pack("3q", *entry) for entry in found)]
        with tempfile.TemporaryDirectory() as folder:
            case, result = Path(folder, "case"), Path(folder, "result")
            case.write_bytes(b"".join(words))
            command = [emulator(), str(driver()), str(self.level), str(case), str(result)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name} at level {self.level}: status {done.returncode}, {done.stderr}")
            data = result.read_bytes()
        for begin, size in written:
            ctypes.memmove(begin, data[:size], size)
            data = data[size:]
