"""Every op on a GPU beside torch's: SDPA by FlashAttention and by cuDNN, FlexAttention, compiled forms, a copy.

Times are the GPU's own, with caches flushed; the host's time a call stands beside them. Two lengths come first, what
has to be compiled after them, then the other lengths, until the budget ends. Each row is on the disk once measured;
a contender that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from gpu_cases import BF16, OURS, PROFILED, TINY, Case, Sizes, cases
from gpu_clock import Clock, GpuClock, Rows, WallClock, at_most

from gistkit.common.files import write_text

FIRST, REST = (8192, 32768), (16384, 65536)
QUICK = (512,)
# Rows of the square bfloat16 matrices whose product, and copy, is the most that the chip does: on a GPU, and quick.
CEILING, QUICK_CEILING = 8192, 64
# Most seconds of a contender, and of one that is compiled.
LIMITS = {False: 30.0, True: 90.0}


def work(lengths: Sequence[Sequence[int]], sizes: Sizes, only: str) -> Iterator[tuple[Case, bool]]:
    """The cases in their order, each with whether its compiled contenders are meant."""
    for group in lengths:
        found = [case for length in group for case in cases(length, sizes) if only in case.name]
        for compiled in (False, True):
            yield from ((case, compiled) for case in found)


@dataclass(frozen=True)
class Ceilings:
    """What shares are of: TF/s of a large product of random bfloat16 matrices, TB/s that a large copy moves."""

    tflops: float
    tbps: float

    @classmethod
    def measured(cls, clock: Clock, device: str, size: int) -> Ceilings:
        """Those of this chip, by matrices of `size` rows."""
        a, b = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
        many = a.expand(8, size, size).contiguous()
        product, copy = clock.measure(lambda: a @ b).median, clock.measure(many.clone).median
        return cls(2 * size**3 / product * 1e-9, 2 * many.nbytes / copy * 1e-9)


def rates(case: Case, form: str, ms: float, ceilings: Ceilings) -> dict[str, float]:
    """What follows from a time: TF/s or TB/s, and their share of the chip's limit."""
    if form in case.unrated:
        return {}
    unit, rate, limit = "tflops", case.work / ms * 1e-9, ceilings.tflops
    if not case.work:
        unit, rate, limit = "tbps", case.traffic / ms * 1e-9, ceilings.tbps
    if not rate:
        return {}
    return {unit: rate, "share": rate / limit} if case.shared else {unit: rate}


def line(case: Case, form: str, row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    if "error" in row:
        return f"{case.name:72} {form:36} {row['error']}"
    rate = "".join(f" {row[key]:8.2f} {unit}" for key, unit in (("tflops", "TF/s"), ("tbps", "TB/s")) if key in row)
    share = f" = {row['share']:.0%}" if "share" in row else ""
    return f"{case.name:72} {form:36} {row['ms']:9.4f} ms{rate}{share}; host {row['host_ms']:.4f} ms"


def run(case: Case, compiled: bool, clock: Clock, rows: Rows, device: str, ceilings: Ceilings, deadline: float) -> None:
    """Measures the contenders of a case; a RuntimeError says that the GPU can be used no more."""
    limit = LIMITS[compiled]
    shared = {"case": case.name, "length": case.length}
    try:
        with at_most(min(limit, deadline - time.monotonic())):
            torch.manual_seed(0)
            torch.compiler.reset()
            forms = case.make(device, compiled)
    except Exception as error:
        rows.add({**shared, "form": "making the contenders", "error": said(error)})
        print(f"{case.name:72} {said(error)}", flush=True)
        check(device)
        return
    for form, call in forms.items():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        try:
            with at_most(min(limit, left)):
                times = clock.measure(call)
        except Exception as error:
            failed = {"error": said(error)}
            rows.add({**shared, "form": form, **failed})
            print(line(case, form, failed), flush=True)
            check(device)
        else:
            found = rates(case, form, times.median, ceilings)
            row = {"ms": times.median, "low": times.low, "high": times.high, "host_ms": times.host, **found}
            rows.add({**shared, "form": form, "runs": times.runs, **{name: rounded(x) for name, x in row.items()}})
            print(line(case, form, row), flush=True)


def rounded(value: float) -> float:
    """Four digits, more than runs agree in."""
    return float(f"{value:.4g}")


def said(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def check(device: str) -> None:
    """Raises where a failure has left the GPU unusable, as an illegal access does."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def driver() -> str:
    """The GPU's driver, as its own tool tells; "unknown" without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said[0] if said else "unknown"


def machine(device: str) -> dict[str, object]:
    """What every row says."""
    found = harness.environment()
    there = {"gpu": torch.cuda.get_device_name(), "driver": driver()} if device == "cuda" else {"gpu": "none: a CPU"}
    return {**there, "cuda": torch.version.cuda, "torch": found["torch"], "commit": found["commit"]}


@contextmanager
def recording(options: argparse.Namespace, suite: str, facts: Mapping[str, object]) -> Iterator[Rows]:
    """A file of rows, runs/gpu/SUITE.jsonl where --json names none, for as long as the run takes.

    With --save one that came to its end is copied into benchmarks/results/MACHINE, or if quick into runs/benchmarks.
    """
    begun, path = time.monotonic(), options.json or harness.ROOT / "runs" / "gpu" / f"{suite}.jsonl"
    rows = Rows(path, facts)
    try:
        yield rows
    finally:
        rows.close()
        print(f"{suite}: {rows.count} rows in {path}, {time.monotonic() - begun:.0f} s", flush=True)
    if options.save and (text := path.read_text()):
        kept = "runs/benchmarks" if options.quick else "benchmarks/results"
        saved = harness.ROOT / kept / harness.slug(str(facts["gpu"]), "cuda") / f"{suite}.jsonl"
        write_text(saved, text)
        print(f"wrote {saved}")


def once(sizes: Sizes, length: int, device: str) -> None:
    """One call each of a few cases, for a profiler."""
    for case in cases(length, sizes):
        backward = case.name.endswith("+ backward")
        if case.name.startswith(PROFILED) and backward == case.name.startswith("attention"):
            print(case.name, flush=True)
            case.make(device, False)[OURS]()


def parser(description: str | None, suite: str, budget: float, example: str) -> argparse.ArgumentParser:
    """The options of a benchmark that records rows until its budget ends."""
    options = harness.command(description, example)
    options.add_argument("--budget", type=float, default=budget, help="seconds until it ends (default: %(default)s)")
    options.add_argument("--json", type=Path, help=f"file of rows (default: runs/gpu/{suite}.jsonl)")
    options.add_argument("--save", action="store_true", help="copy them to benchmarks/results/MACHINE at the end")
    options.add_argument("--only", default="", metavar="TEXT", help="cases that have this in their names")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that every case runs")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the cases")
    return options


def parsed(options: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What they are, where they fit together and the machine."""
    chosen = options.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        options.error("there is no GPU here, or this torch has no CUDA")
    if chosen.save and chosen.only:
        options.error("--only: expected none with --save, whose file has all cases")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures until all is done or the budget ends."""
    begun = time.monotonic()
    options = parser(__doc__, "gpu", 480, "python benchmarks/gpu.py --budget 300 --json runs/gpu/gpu.jsonl")
    options.add_argument("--once", action="store_true", help="call a few cases once each, untimed, for a profiler")
    chosen = parsed(options, arguments)
    on_gpu = chosen.device == "cuda"
    sizes, lengths = (TINY, [QUICK]) if chosen.quick else (Sizes(), [FIRST, REST])
    # On a CPU nothing is compiled: that would only take time.
    with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
        if chosen.once:
            once(sizes, lengths[0][0], chosen.device)
            return 0
        clock: Clock = GpuClock() if on_gpu else WallClock()
        facts = machine(chosen.device)
        print("gpu: " + ", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
        ceilings = Ceilings.measured(clock, chosen.device, QUICK_CEILING if chosen.quick else CEILING)
        print(f"gpu: a product {ceilings.tflops:.3g} TF/s, a copy {ceilings.tbps:.3g} TB/s", flush=True)
        facts |= {"product_tflops": rounded(ceilings.tflops), "copy_tbps": rounded(ceilings.tbps)}
        deadline = begun + chosen.budget
        try:
            with recording(chosen, "gpu", facts) as rows:
                for case, compiled in work(lengths, sizes, chosen.only):
                    if time.monotonic() >= deadline:
                        print("gpu: the budget has ended", flush=True)
                        break
                    run(case, compiled, clock, rows, chosen.device, ceilings, deadline)
        except RuntimeError as error:
            print(f"gpu: stopped, the GPU can be used no more: {said(error)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
