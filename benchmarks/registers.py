"""Registers, spills, widths of memory accesses and loads in flight of every CUDA kernel: a committed table.

Compiles csrc/cuda for sm_80 and sm_90a and disassembles it; needs nvcc and nvdisasm, no GPU.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TABLE = Path(__file__).parent / "registers.csv"
SOURCES = sorted((CSRC / "cuda").glob("*/*.cu"))
ARCHITECTURES = ("80", "90a")
KEYS = ("source", "kernel", "architecture")
SPILLS = ("spill_stores", "spill_loads")
# Instructions by their bits: "32x5 128x2" is five of 4 bytes and two of 16.
ACCESSES = {"loads": "LDG", "stores": "STG", "shared_loads": "LDS", "shared_stores": "STS"}
# Loads and stores of which the compiler does not know whether their memory is shared.
GENERIC = ("LD", "ST")
FIELDS = (*KEYS, "registers", "stack", *SPILLS, *ACCESSES, "generic", "in_flight", "wgmma")
# What ptxas says where it makes a wgmma wait for the one before, or adds a wait or a fence of its own.
SERIALIZED = re.compile(r"\((?:C7512|C7514|C7519|C7520)\).*")
JUMPS = ("BRA", "BRX", "BRXU", "EXIT", "RET")

Row = dict[str, str]


class Instruction(NamedTuple):
    """One of a disassembled function; the opcode of a label is empty."""

    predicated: bool
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def bits(self) -> int:
        """How wide a load or store is."""
        named = re.search(r"\.[US]?(8|16|64|128|256)(?=\.|$)", self.opcode)
        return int(named[1]) if named else 32


def disassembler() -> str:
    """nvdisasm, from PATH or among Python's packages."""
    if found := shutil.which("nvdisasm"):
        return found
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/nvdisasm"):
            return str(path)
    raise RuntimeError("nvdisasm is missing: install CUDA's, or `pip install nvidia-cuda-nvdisasm`")


def _output_of(command: list[str]) -> tuple[str, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout, done.stderr


def compiled(source: Path, architecture: str) -> tuple[str, str]:
    """What ptxas says of a source, and the instructions."""
    flags = ["-std=c++20", "-O3", f"-I{CSRC}", "-Xptxas", "-v", "-cubin"]
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        _, said = _output_of(["nvcc", *flags, target, str(source), "-o", cubin])
        sass, _ = _output_of([disassembler(), "-c", cubin])
    return said, sass


def functions_of(sass: str) -> dict[str, list[Instruction]]:
    """What nvdisasm prints, by the functions' mangled names."""
    functions: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    for line in sass.splitlines():
        if found := re.match(r"\.text\.(\S+):", line):
            code = functions.setdefault(found[1], [])
        elif line.startswith(".L"):
            code.append(Instruction(False, "", ()))
        elif found := re.match(r"\s+/\*\w+\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line):
            operands = tuple(operand.strip() for operand in found[3].split(","))
            code.append(Instruction(bool(found[1]), found[2], operands))
    return functions


def widths_of(code: list[Instruction], name: str) -> str:
    """How many of these instructions there are of each width."""
    counts = Counter(instruction.bits for instruction in code if instruction.name == name)
    return " ".join(f"{bits}x{count}" for bits, count in sorted(counts.items()))


def most_in_flight(code: list[Instruction]) -> int:
    """The most bytes of global memory that a thread asks for, without a jump between, before it uses one of them."""
    most = bits = 0
    loaded: set[int] = set()
    for instruction in code:
        read = instruction.operands if instruction.name in ("ST", "STG", "STS", "STL") else instruction.operands[1:]
        used = {int(register) for operand in read for register in re.findall(r"\bR(\d+)", operand)}
        jumps = instruction.name in JUMPS and not instruction.predicated
        if not instruction.opcode or jumps or used & loaded:
            loaded, bits = set(), 0
        if instruction.name == "LDG" and (to := re.match(r"R(\d+)", instruction.operands[0])):
            loaded.update(range(int(to[1]), int(to[1]) + max(instruction.bits // 32, 1)))
            bits += instruction.bits
            most = max(most, bits // 8)
    return most


def rows_of(source: str, architecture: str, said: str, sass: str) -> list[Row]:
    """The kernels that ptxas said something of, with their accesses."""
    functions = functions_of(sass)
    rows: list[Row] = []
    kernel, frame = "", ("0", "0", "0")
    for line in said.splitlines():
        if found := re.search(r"Compiling entry function '(.+)' for", line):
            kernel = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = found.groups()
        elif found := re.search(r"Used (\d+) registers", line):
            facts = dict(zip(FIELDS, (source, kernel, f"sm_{architecture}", found[1], *frame), strict=False))
            code = functions[kernel]
            facts |= {kind: widths_of(code, name) for kind, name in ACCESSES.items()}
            facts["generic"] = str(sum(instruction.name in GENERIC for instruction in code))
            facts["in_flight"] = str(most_in_flight(code))
            facts["wgmma"] = str(sum(instruction.name == "HGMMA" for instruction in code))
            rows.append(facts)
    names = subprocess.run(
        ["c++filt"], input="\n".join(row["kernel"] for row in rows), capture_output=True, text=True, check=True
    ).stdout
    for row, name in zip(rows, names.splitlines(), strict=True):
        short = re.sub(r"^void |gistkit::|cuda::|\(anonymous namespace\)::|_INTERNAL_\w+::", "", name)
        row["kernel"] = re.sub(r"\([^()]*\)$", "", short)
    return rows


def faults_of(source: str, architecture: str, said: str, sass: str) -> list[str]:
    """What is wrong with the kernels of wgmma, whatever the table says; a line each.

    Spills among the products are those of the warps that multiply: the others' code lies before or behind.
    """
    found = [f"{source} sm_{architecture}: {line[0]}" for line in SERIALIZED.finditer(said)]
    functions = functions_of(sass)
    products = {
        kernel: [i for i, instruction in enumerate(code) if instruction.name == "HGMMA"]
        for kernel, code in functions.items()
    }
    for kernel, code in functions.items():
        at = products[kernel]
        if any(instruction.name in ("STL", "LDL") for instruction in (code[at[0] : at[-1]] if at else [])):
            found.append(f"{source} sm_{architecture}: {kernel} spills among its wgmma")
        if not at and any(instruction.name == "USETMAXREG" for instruction in code):
            found.append(f"{source} sm_{architecture}: {kernel} has no wgmma")
    if source.rpartition("/")[2].startswith("hopper") and architecture == "90a" and functions:
        found += [] if any(products.values()) else [f"{source} sm_{architecture}: no kernel has wgmma"]
    return found


def name_of(source: Path) -> str:
    """Its path in csrc/cuda, such as rope/rotation."""
    return source.relative_to(CSRC / "cuda").with_suffix("").as_posix()


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [row[key] for key in KEYS])


def report(sources: list[Path]) -> tuple[list[Row], list[str]]:
    """A row for each kernel and architecture, in order, and what `faults_of` finds."""
    work = list(product(sources, ARCHITECTURES))
    with ThreadPoolExecutor(2) as pool:
        found = tqdm(pool.map(lambda item: compiled(*item), work), total=len(work), desc="nvcc", unit="file")
        said = [(name_of(path), arch, *texts) for (path, arch), texts in zip(work, found, strict=True)]
    rows = [row for texts in said for row in rows_of(*texts)]
    return in_order(rows), [fault for texts in said for fault in faults_of(*texts)]


def _counts(cell: str) -> dict[int, int]:
    return {int(bits): int(n) for bits, _, n in (item.partition("x") for item in cell.split())}


def narrower(now: str, committed: str) -> bool:
    """Whether wide accesses became narrow ones: at some width fewer are that wide, and more are not."""
    new, old = _counts(now), _counts(committed)

    def split(counts: dict[int, int], width: int) -> tuple[int, int]:
        wide = sum(n for bits, n in counts.items() if bits >= width)
        return wide, sum(counts.values()) - wide

    for width in old:
        (wide, narrow), (wide_then, narrow_then) = split(new, width), split(old, width)
        if wide < wide_then and narrow > narrow_then:
            return True
    return False


def losses(rows: list[Row], committed: list[Row]) -> list[str]:
    """What is not as in the committed table, or worse; a line each.

    Another compiler may count registers, unroll and schedule differently: kernels and spills are to be the same,
    accesses as wide and no more of them generic, more than half as many bytes in flight, and wgmma where it was.
    """
    new, old = ({" ".join(row[key] for key in KEYS): row for row in table} for table in (rows, committed))
    found = [f"{kernel}: not in the table" for kernel in new if kernel not in old]
    found += [f"{kernel}: in the table only" for kernel in old if kernel not in new]
    for kernel in [kernel for kernel in new if kernel in old]:
        now, then = new[kernel], old[kernel]
        worse = [kind for kind in SPILLS if now[kind] != then[kind]]
        worse += [kind for kind in ACCESSES if narrower(now[kind], then[kind])]
        worse += ["generic"] * (int(now["generic"]) > int(then["generic"]))
        worse += ["wgmma"] * (int(now["wgmma"]) == 0 < int(then["wgmma"]))
        worse += ["in_flight"] * (2 * int(now["in_flight"]) <= int(then["in_flight"]) > 0)
        found += [f"{kernel}: {kind} {now[kind]}, was {then[kind]}" for kind in worse]
    return found


def main() -> None:
    """Writes the table, or compares it with the committed one."""
    options = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/registers.py --check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--check", action="store_true", help="write nothing; fail where a kernel is worse than the table"
    )
    options.add_argument("--only", nargs="+", metavar="SOURCE", help="these sources alone, such as rope/rotation")
    chosen = options.parse_args()
    names = [name_of(path) for path in SOURCES]
    if unknown := set(chosen.only or []) - set(names):
        sys.exit(f"--only: expected some of {', '.join(names)}; got {', '.join(unknown)}")
    sources = [path for path in SOURCES if not chosen.only or name_of(path) in chosen.only]
    try:
        disassembler()
        rows, faults = report(sources)
    except RuntimeError as error:
        sys.exit(str(error))
    spilling = [row for row in rows if any(int(row[kind]) for kind in SPILLS)]
    print(f"{len(rows)} kernels, {len(spilling)} of which spill")
    for row in spilling:
        print("  " + ", ".join(f"{key} {value}" for key, value in row.items()))

    if faults:
        sys.exit("\n".join(faults))

    with TABLE.open(newline="") as file:
        committed = list(csv.DictReader(file))
    compared = {name_of(path) for path in sources}
    if chosen.check:
        if found := losses(rows, [row for row in committed if row["source"] in compared]):
            advice = f"{TABLE.name} says otherwise: mend this, or run `python benchmarks/registers.py` and look at it"
            sys.exit("\n".join([*found, advice]))
        return
    if chosen.only:
        rows = in_order(rows + [row for row in committed if row["source"] not in compared])
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
