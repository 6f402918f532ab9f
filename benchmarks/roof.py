"""Measures what this machine can do at most: float32 multiply-adds in registers, and reading memory.

A small C++ file is compiled for each instruction set by the system's compiler (`c++`, or $CXX) and timed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from gistkit.ops import best_isa
from gistkit.ops._library import ISA_NAMES

SOURCE = Path(__file__).resolve().with_name("roof.cpp")
# Vector bytes and the compiler's flags. The generic kernels have no fused multiply-add either.
BUILDS = {
    "generic": (16, []),
    "avx2": (32, ["-mavx2", "-mfma"]),
    "avx512": (64, ["-mavx512f", "-mfma", "-mprefer-vector-width=512"]),
}
# Instruction sets that multiply bfloat16 as it is: no share of a float32 roof says what they reach.
UNRATED = ("avx512_bf16", "amx")


@dataclass(frozen=True)
class Roof:
    """Upper limits of a machine.

    Args:
        gflops: for each instruction set the float32 gigaflops of 1, 2, .. threads together.
        read_gbps: gigabytes a second that all threads together read from memory.
        read_mib: size of the buffer they read, MiB; well beyond the last cache.
    """

    gflops: dict[str, list[float]]
    read_gbps: float
    read_mib: int

    def peak(self, form: str) -> float:
        """Gigaflops of all threads with the instruction set that ends the form's name, or else the best one."""
        isa = form.rsplit(" ", 1)[-1]
        return (self.gflops.get(isa) or list(self.gflops.values())[-1])[-1]

    def best_of(self, other: Roof) -> Roof:
        """The higher figures of two measurements of one machine: whatever else it does only lowers them."""
        gflops = {
            isa: [max(pair) for pair in zip(rates, other.gflops[isa], strict=True)]
            for isa, rates in self.gflops.items()
        }
        return Roof(gflops, max(self.read_gbps, other.read_gbps), self.read_mib)


def rated_isas(best: str) -> list[str]:
    """The instruction sets up to `best` that have float32 multiply-adds of their own."""
    return [isa for isa in ISA_NAMES[: ISA_NAMES.index(best) + 1] if isa in BUILDS]


def last_cache_bytes() -> int:
    """Size of the largest cache that Linux names; 64 MiB if it names none."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * 1024 for size in sizes if size.endswith("K")), default=64 << 20)


def beyond_cache_bytes() -> int:
    """Four times the last cache, at least 1 GiB, at most a quarter of the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(1 << 30, 4 * last_cache_bytes()), memory // 4)


def _compiled(isa: str, folder: str) -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"roof: expected a C++ compiler, found no {compiler!r}; set CXX to one")
    width, flags = BUILDS[isa]
    library = Path(folder) / f"{isa}.so"
    command = [compiler, "-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", f"-DWIDTH={width}", *flags]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.multiply_add_gflops.restype = loaded.read_gbps.restype = ctypes.c_double
    return loaded


def measure(
    isas: Sequence[str], threads: int, *, seconds: float = 0.3, repeats: int = 5, read_bytes: int | None = None
) -> Roof:
    """Measures the instruction sets `isas` (narrow to wide) with 1 to `threads` threads, the best of `repeats` each.

    The best, because whatever else the machine does only lowers a figure; memory is read twice, as filling the buffer
    takes longer than reading it. `seconds` is the time of one measurement, `read_bytes` the size of the buffer that is
    read; default: beyond the last cache.
    """
    gflops = {isa: [0.0] * threads for isa in isas}
    size = read_bytes or beyond_cache_bytes()
    bandwidth = 0.0
    time = ctypes.c_double(seconds)
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=repeats * len(isas) * threads + 2, desc="roof", leave=False, dynamic_ncols=True) as bar,
    ):
        libraries = {isa: _compiled(isa, folder) for isa in isas}
        # In rounds, so that a disturbance of a second does not hit all measurements of one figure.
        for _ in range(repeats):
            for isa, peaks in gflops.items():
                for i in range(threads):
                    peaks[i] = max(peaks[i], libraries[isa].multiply_add_gflops(i + 1, time))
                    bar.update()
        for _ in range(2):
            bandwidth = max(bandwidth, libraries[isas[-1]].read_gbps(threads, ctypes.c_double(size), time))
            bar.update()
    return Roof(gflops, bandwidth, size >> 20)


def lines(roof: Roof) -> list[str]:
    """The figures, a line each."""
    found = [
        f"  {isa:8} {rate:8.1f} GF/s float32 multiply-adds, {count + 1} thread{'s' if count else ''}"
        for isa, rates in roof.gflops.items()
        for count, rate in enumerate(rates)
    ]
    return [*found, f"  {'memory':8} {roof.read_gbps:8.1f} GB/s read, all threads, {roof.read_mib} MiB"]


def main() -> None:
    """Prints the roof of this machine."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/roof.py --threads 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=2, help="most threads (default: %(default)s)")
    options = parser.parse_args()
    print("\n".join(lines(measure(rated_isas(best_isa()), options.threads))))


if __name__ == "__main__":
    main()
