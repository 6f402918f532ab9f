"""Registers, spills and static shared memory of every CUDA kernel, as nvcc reports them: a committed table.

Compiles csrc/cuda for sm_80 and sm_90a; needs nvcc, no GPU.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from tqdm import tqdm

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TABLE = CSRC / "cuda" / "registers.csv"
ARCHITECTURES = ("80", "90a")
FIELDS = ("kernel", "architecture", "registers", "stack", "spill_stores", "spill_loads")


def compiled(source: Path, architecture: str) -> str:
    """What ptxas says of a source.

    Raises:
        RuntimeError: nvcc failed; with its output.
    """
    flags = ["-std=c++20", "-O3", f"-I{CSRC}", "-Xptxas", "-v", "-cubin"]
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *flags, target, str(source), "-o", f"{folder}/kernels.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source.name}: nvcc failed:\n{done.stderr}")
    return done.stderr


def rows_of(text: str, architecture: str) -> list[dict[str, str]]:
    """The kernels in ptxas's report."""
    names = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout
    rows: list[dict[str, str]] = []
    kernel, frame = "", ("0", "0", "0")
    for line in names.splitlines():
        if found := re.search(r"Compiling entry function '(.+)' for", line):
            kernel = re.sub(r"^void |gistkit::|cuda::|\(anonymous namespace\)::|_INTERNAL_\w+::", "", found[1])
            kernel = re.sub(r"\([^()]*\)$", "", kernel)
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = found.groups()
        elif found := re.search(r"Used (\d+) registers", line):
            rows.append(dict(zip(FIELDS, (kernel, f"sm_{architecture}", found[1], *frame), strict=True)))
    return rows


def report() -> list[dict[str, str]]:
    """A row for each kernel and architecture, sorted."""
    work = list(product(sorted((CSRC / "cuda").glob("*.cu")), ARCHITECTURES))
    with ThreadPoolExecutor(2) as pool:
        texts = tqdm(pool.map(lambda item: compiled(*item), work), total=len(work), desc="nvcc", unit="file")
        rows = [row for (_, arch), text in zip(work, texts, strict=True) for row in rows_of(text, arch)]
    return sorted(rows, key=lambda row: (row["kernel"], row["architecture"]))


def main() -> None:
    """Writes the table, or compares it with the committed one."""
    options = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/registers.py --check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--check", action="store_true", help="write nothing; fail where spills are not the table's")
    chosen = options.parse_args()
    rows = report()
    spilling = [row for row in rows if int(row["spill_stores"]) or int(row["spill_loads"])]
    print(f"{len(rows)} kernels, {len(spilling)} of which spill")
    for row in spilling:
        print("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
    if not chosen.check:
        with TABLE.open("w", newline="") as file:
            table = csv.DictWriter(file, FIELDS, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        return
    with TABLE.open(newline="") as file:
        committed = list(csv.DictReader(file))

    def facts(table: list[dict[str, str]]) -> list[list[str]]:
        # Another compiler may count registers differently; kernels and spills must be the committed ones.
        return [[row[key] for key in FIELDS if key not in ("registers", "stack")] for row in table]

    if facts(rows) != facts(committed):
        sys.exit(
            f"{TABLE.name} is not what nvcc reports: run `python benchmarks/registers.py` and look at the difference"
        )


if __name__ == "__main__":
    main()
