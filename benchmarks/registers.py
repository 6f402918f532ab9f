"""Registers, stack, shared and local memory of every CUDA kernel, from the built library: a committed table.

Stack or local memory means that a kernel spills. No attention kernel for head dims up to 128 may.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "registers.csv"
FIELDS = ("kernel", "architecture", "registers", "stack", "shared", "local")


def report(library: Path) -> list[dict[str, str]]:
    """A row for each kernel and architecture, sorted.

    Raises:
        subprocess.CalledProcessError: cuobjdump or c++filt failed.
    """
    command = ["cuobjdump", "--dump-resource-usage", str(library)]
    mangled = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True).stdout
    rows, architecture, kernel = [], "", ""
    for line in text.splitlines():
        if found := re.search(r"arch = (\w+)", line):
            architecture = found[1]
        elif found := re.search(r"Function (.+):$", line.strip()):
            kernel = re.sub(r"^void |gistkit::cuda::|gistkit::|\(anonymous namespace\)::", "", found[1])
            kernel = re.sub(r"\((?!int|bool|unsigned).*$", "", kernel)
        elif found := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            rows.append(dict(zip(FIELDS, (kernel, architecture, *found.groups()), strict=True)))
    return sorted(rows, key=lambda row: (row["kernel"], row["architecture"]))


def spills(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The kernels that keep something outside registers."""
    return [row for row in rows if int(row["stack"]) or int(row["local"])]


def main() -> None:
    """Writes the table, or compares it with the committed one."""
    options = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/registers.py --library build/cuda/site/gistkit/libgistkit_cuda.so",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--library", type=Path, required=True, help="libgistkit_cuda.so; `make cuda` builds one")
    options.add_argument(
        "--check", action="store_true", help="write nothing; fail where the committed table spills or differs"
    )
    chosen = options.parse_args()
    rows = report(chosen.library)
    print(f"{len(rows)} kernels; {len(spills(rows))} with stack or local memory")
    for row in spills(rows):
        print("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
    if not chosen.check:
        with TABLE.open("w", newline="") as file:
            table = csv.DictWriter(file, FIELDS, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        return
    with TABLE.open(newline="") as file:
        committed = list(csv.DictReader(file))

    # Another compiler counts registers differently; kernels and spills must be the committed ones.
    def facts(table: list[dict[str, str]]) -> list[tuple[str, str, str, str]]:
        return [(row["kernel"], row["architecture"], row["stack"], row["local"]) for row in table]

    if facts(rows) != facts(committed):
        sys.exit(
            f"{TABLE.name} is not what this library has: run `python benchmarks/registers.py --library {chosen.library}`"
        )


if __name__ == "__main__":
    main()
