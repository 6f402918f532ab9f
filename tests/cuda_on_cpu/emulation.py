"""Builds CUDA sources for the CPU and runs their launchers on tensors, under the emulator.

    structs = [("common/rope.h", "gistkit::RopeParams", RopeParams)]
    library = build("rope", ["csrc/cuda/rope/rotation.cu"], checked=True, structs=structs)
    library.run("gistkit::cuda::rope", params, inputs={"query": query}, outputs={"out": out}, order="random")

A checked build looks at every access to memory and is several times slower. Libraries are kept in `build/` by their
contents. `GISTKIT_EMULATOR_SANITIZE=address` in the environment builds all with that sanitizer in place of the checks.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent.relative_to(ROOT)
BUILD = ROOT / "build" / "cuda_on_cpu"
PARTS = ("fibers", "warp", "matrix", "wgmma", "shared", "async", "checks", "banks", "hooks", "launch", "runtime")
ORDERS = ("forward", "reverse", "random")
# How kernels are built, and in which order their threads run, where a call does not say.
CHECKED, ORDER = False, ORDERS[0]
COPIES = ("poison", "eager", "lazy")
SHARED_LIMIT = 227 * 1024  # bytes of shared memory a block: sm_90's; sm_86, sm_89 and sm_120 have 99 KB

Struct = tuple[str, str, type[ctypes.Structure]]
Pointer, Bool, Int, Long, Double = ctypes.c_void_p, ctypes.c_bool, ctypes.c_int, ctypes.c_int64, ctypes.c_double
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def mirror(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    """A structure of C++ for ctypes: names of fields, and the type of these."""
    members = [(member, kind) for names, kind in fields for member in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


class EmulatorError(RuntimeError):
    """What the emulator found wrong with a kernel or its launch."""


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _sanitizer() -> list[str]:
    name = os.environ.get("GISTKIT_EMULATOR_SANITIZE")
    return [f"-fsanitize={name}"] if name else []


def _flags() -> list[str]:
    flags = ["-std=c++20", "-fPIC", "-fno-gnu-unique", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    # Its own headers first: they stand in for CUDA's and for those of csrc/cuda/core that have instructions.
    return [*flags, f"-I{FOLDER / 'emulator' / 'include'}", "-Icsrc", f"-I{FOLDER}", *_sanitizer()]


def kernel_flags(checked: bool) -> list[str]:
    """Without checks, what compiles soonest: kernels run for seconds."""
    if not checked:
        return ["-O1"]
    # Lines of the source for messages. Taken apart into scalars, a vector's load would look like several.
    instrumented = [] if _sanitizer() else ["-fsanitize=thread,alignment", "-fno-tree-sra"]
    return ["-O2", "-g", *instrumented]


def _call(command: Sequence[str]) -> bytes:
    # What is preloaded is meant for Python.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr.decode()}")
    return result.stdout


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made where it is missing: by one process, while the others that need it wait."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_suffix(".part")
                make(part)
                part.replace(path)
    return path


def written(name: str, text: str) -> str:
    """A source of this text, in `build/`."""
    path = BUILD / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cpp"
    return str(once(path, lambda part: part.write_text(text)).relative_to(ROOT))


def _object(source: str, flags: Sequence[str]) -> Path:
    """The compiled source, from `build/` when the same text was compiled before."""
    command = [_compiler(), *_flags(), *flags, "-x", "c++"]
    text = _call([*command, "-E", source])
    key = hashlib.sha256(b"\0".join([*(word.encode() for word in command), text])).hexdigest()[:24]
    path = BUILD / f"{Path(source).stem}-{key}.o"
    return once(path, lambda part: _call([*command, "-c", source, "-o", str(part)]))


def _link(name: str, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    key = hashlib.sha256("\0".join([*map(str, objects), *flags, *_sanitizer()]).encode()).hexdigest()[:24]
    link = [_compiler(), "-shared", "-Wl,-Bsymbolic", *_sanitizer(), *map(str, objects), *flags]
    return once(BUILD / f"lib{name}-{key}.so", lambda part: _call([*link, "-o", str(part)]))


@functools.cache
def _emulator() -> tuple[Path, ctypes.CDLL]:
    """One for the process: every library of kernels shares its settings and its tensors."""
    path = _link("emulator", [_object(str(FOLDER / "emulator" / f"{part}.cpp"), ["-O2"]) for part in PARTS], ["-ldl"])
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.gistkit_emulator_error.restype = ctypes.c_char_p
    library.gistkit_emulator_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int]
    library.gistkit_emulator_configure.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t]
    library.gistkit_emulator_configure.argtypes += [ctypes.c_int]
    return path, library


def layout_source(structs: Iterable[Struct]) -> str:
    """Checks, when it is compiled, that ctypes structures have the layout of the C++ ones."""
    lines = ["#include <cstddef>"]
    for header, name, mirror in structs:
        lines.append(f'#include "{header}"')
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "size of {name}");')
        for field, *_ in mirror._fields_:
            offset = getattr(mirror, field).offset
            # A field that is a Python keyword has a trailing underscore in the mirror.
            member = field.rstrip("_")
            lines.append(f'static_assert(offsetof({name}, {member}) == {offset}, "{name}::{member}");')
    return "\n".join(lines) + "\n"


@functools.cache
def _build(name: str, sources: tuple[str, ...], checked: bool, defines: tuple[str, ...], layout: str) -> Library:
    emulator, _ = _emulator()
    flags = [*kernel_flags(checked), *(f"-D{define}" for define in defines)]
    if layout:
        # Offsets in a derived struct are well defined where g++ computes them.
        _object(written("layout", layout), [*flags, "-Wno-invalid-offsetof"])
    objects = [_object(source, flags) for source in sources]
    return load(_link(name, objects, [str(emulator), f"-Wl,-rpath,{BUILD}"]))


def load(path: Path) -> Library:
    """A library and the demangled names of what it defines."""
    symbols = _call(["nm", "-D", "--defined-only", str(path)]).decode().split()[2::3]
    demangled = _call(["c++filt", *symbols]).decode().splitlines()
    return Library(path, ctypes.CDLL(str(path)), dict(zip(demangled, symbols, strict=True)))


def build(
    name: str,
    sources: Sequence[str],
    *,
    checked: bool | None = None,
    defines: Sequence[str] = (),
    structs: Sequence[Struct] = (),
) -> Library:
    """Compiles `.cu` sources (paths from the root of the repository) into one library.

    `structs`: (header, C++ name, ctypes.Structure); their sizes and offsets are compared by the compiler.
    """
    checked = CHECKED if checked is None else checked
    return _build(name, tuple(sources), checked, tuple(defines), layout_source(structs) if structs else "")


class Statistics(NamedTuple):
    """Counts since the last call. A matrix load is of one 8x8 matrix; it conflicts when two rows share banks.

    Shared loads and stores are the plain ones of a warp, as wide as the source has them, in checked builds alone. A
    wavefront serves each of the 32 banks of 4 bytes once: without conflicts 1, 2 or 4 for 4, 8 or 16 bytes a lane.
    """

    blocks: int
    switches: int
    products: int
    matrix_loads: int
    conflicting_loads: int
    shared_loads: int
    load_wavefronts: int
    shared_stores: int
    store_wavefronts: int


def statistics() -> Statistics:
    counts = (ctypes.c_uint64 * 9)()
    _emulator()[1].gistkit_emulator_statistics(counts)
    return Statistics(*counts)


def configure(
    *,
    order: str | None = None,
    seed: int = 1,
    copies: str = "poison",
    shared_limit: int = SHARED_LIMIT,
    capability: int = 80,
) -> None:
    """Sets the device and its ways, for what a launcher is asked before it runs.

    `capability`: ten times the device's compute capability; hopper.cuh's kernels serve at 90.
    """
    numbers = (ORDERS.index(order or ORDER), seed, COPIES.index(copies), shared_limit, capability)
    _emulator()[1].gistkit_emulator_configure(*numbers)


@dataclass
class Library:
    path: Path
    loaded: ctypes.CDLL
    symbols: dict[str, str]

    def function(self, name: str) -> ctypes._CFuncPtr:
        """The function of a demangled name without its parameters, such as `gistkit::cuda::rope`."""
        found = [symbol for text, symbol in self.symbols.items() if text == name or text.startswith(f"{name}(")]
        if len(found) != 1:
            raise KeyError(f"expected one function {name} in {self.path.name}, got {found or sorted(self.symbols)}")
        return self.loaded[found[0]]

    def run(
        self,
        name: str,
        params: ctypes.Structure,
        *more: ctypes.Structure | int,
        inputs: Mapping[str, torch.Tensor | None] | None = None,
        outputs: Mapping[str, torch.Tensor | None] | None = None,
        **how: Any,
    ) -> None:
        """Calls the launcher `cudaError_t name(const Params&, ..., cudaStream_t)`; `more`: structures and addresses.

        `how`: as `configure` takes it.

        A checked build faults every access outside of `inputs` and `outputs` and every write to an input; pass all
        tensors that params points to. Raises EmulatorError.
        """
        _, emulator = _emulator()
        emulator.gistkit_emulator_forget()
        for tensors, writable in ((inputs, 0), (outputs, 1)):
            for label, tensor in (tensors or {}).items():
                if tensor is not None and tensor.numel():
                    begin, size = memory_of(tensor)
                    emulator.gistkit_emulator_register(begin, size, label.encode(), writable)
        configure(**how)
        launcher = self.function(name)
        launcher.restype = ctypes.c_int
        arguments = [value if isinstance(value, int) else ctypes.addressof(value) for value in (params, *more, 0)]
        error = launcher(*map(ctypes.c_void_p, arguments))
        emulator.gistkit_emulator_forget()
        if error:
            text = emulator.gistkit_emulator_error().decode()
            raise EmulatorError(text or f"{name} returned cudaError_t {error}")


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and number of bytes from the first to the last element of a strided tensor."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), elements * tensor.element_size()
