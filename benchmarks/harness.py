"""What the benchmarks share: contenders that take turns, machine and commit, a table, JSON and CSV."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import suites
import torch
from roof import UNRATED, Roof
from roof import lines as roof_lines
from tqdm import tqdm

from gistkit.info import processor
from gistkit.ops import best_isa
from gistkit.ops._library import ISA_NAMES
from gistkit_lab.studies import results

ROOT = Path(__file__).resolve().parent.parent
Forms = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """One row of a suite.

    Args:
        name: unique in the suite.
        make: makes the contenders, ours first; ratios are to the first.
        work: floating-point operations that a call cannot do without; 0 if that says nothing.
        traffic: bytes that a call must read from memory; 0 if that says nothing.
        facts: sizes, for the files.
        unrated: contenders that do other work than that, so have no rates.
    """

    name: str
    make: Callable[[], Forms]
    work: float = 0
    traffic: float = 0
    facts: Mapping[str, object] = field(default_factory=dict)
    unrated: Sequence[str] = ()


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contender in one case: quartiles, and how many runs they are of."""

    case: str
    form: str
    low: float
    median: float
    high: float
    runs: int


def take_turns(case: str, forms: Forms, *, seconds: float, least: int = 5) -> list[Timing]:
    """Times all contenders in turn, so that the machine's moods hit them alike; two calls each to warm up.

    A contender whose second call takes more than an eighth of `seconds` takes part in the first `least` rounds only.
    """
    times: dict[str, list[float]] = {name: [] for name in forms}
    slow: set[str] = set()

    def call(name: str) -> float:
        start = time.perf_counter()
        forms[name]()
        return time.perf_counter() - start

    for name in forms:
        call(name)
        if call(name) > seconds / 8:
            slow.add(name)
    end = time.perf_counter() + seconds
    done = 0
    while done < least or (len(slow) < len(forms) and time.perf_counter() < end):
        for name in forms:
            if done < least or name not in slow:
                times[name].append(call(name) * 1e3)
        done += 1
    return [Timing(case, name, *statistics.quantiles(runs, n=4), len(runs)) for name, runs in times.items()]


def slug(name: str, isa: str) -> str:
    """A folder's name for a machine: its processor without trademarks and clock, and an instruction set."""
    plain = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", " ", name.lower())
    return "-".join([*re.findall(r"[a-z0-9]+", plain), isa])


def results_folder(quick: bool) -> Path:
    """Where this machine's figures are kept: benchmarks/results/MACHINE, or runs/benchmarks/MACHINE if quick.

    The machine is named by its widest vectors; units for bfloat16 beside them stand in each suite's machine.
    """
    vectors = [isa for isa in ISA_NAMES[: ISA_NAMES.index(best_isa()) + 1] if isa not in UNRATED]
    return ROOT / ("runs/benchmarks" if quick else "benchmarks/results") / slug(processor(), vectors[-1])


def environment() -> dict[str, object]:
    """The machine, the versions, and the commit with a mark if the sources differ from it."""
    return results.environment(ROOT)


def begin(suite: str, options: argparse.Namespace) -> dict[str, object]:
    """Sets torch's threads and seed; prints the environment, and returns it."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found = environment()
    print(f"{suite}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    return found


def command(description: str | None, example: str) -> argparse.ArgumentParser:
    """A command line whose help has the description as it is written, and an example."""
    return argparse.ArgumentParser(
        description=description, epilog=f"example: {example}", formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser(
    description: str | None, example: str, *, appends: bool = False, apart: bool = False
) -> argparse.ArgumentParser:
    """The options that every benchmark takes, --append for those of `run`, and --case for `measured_apart`."""
    options = command(description, example)
    options.add_argument("--quick", action="store_true", help="few cases and a tenth of the time, noisier")
    options.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    options.add_argument(
        "--json", type=Path, help="write the figures to this file instead, without those of other suites"
    )
    options.add_argument(
        "--save",
        action="store_true",
        help="keep them in benchmarks/results/MACHINE/suites.json, or with --quick in runs/benchmarks/MACHINE",
    )
    if appends:
        options.add_argument(
            "--append",
            action="store_true",
            help="keep the other cases that the suite has there, of the same machine and commit",
        )
    if apart:
        options.add_argument("--case", type=json.loads, help="one case as JSON, measured here: what the others run")
    return options


def measured_here(options: argparse.Namespace, measure: Callable[..., object]) -> bool:
    """Whether --case gave a case, which then has been measured and printed."""
    if options.case is None:
        return False
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(json.dumps(measure(*options.case)))
    return True


def measured_apart(options: argparse.Namespace, *case: object) -> Any:
    """What this command's `measured_here` finds for a case in a process of its own."""
    command = [sys.executable, sys.argv[0], "--threads", str(options.threads), "--case", json.dumps(case)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def output(options: argparse.Namespace) -> Path | None:
    """The JSON file of suites that the command line asks for."""
    if options.json:
        return Path(options.json)
    return results_folder(options.quick) / suites.NAME if options.save else None


def write(suite: str, content: Mapping[str, object], options: argparse.Namespace) -> Path | None:
    """Writes a suite's figures where the command line asks for them: beside the machine's others, or alone (--json)."""
    path = output(options)
    if path is not None:
        suites.write(path, suite, {"suite": suite, **content}, alone=bool(options.json))
        print(f"wrote {suite} to {path}")
    return path


def figures(case: Case, timing: Timing, first: Timing, roof: Roof | None) -> dict[str, float]:
    """What follows from a timing: its ratio to the first contender, its rates, and their shares of the roof."""
    found = {"ratio": timing.median / first.median}
    if timing.form in case.unrated:
        return found
    if case.work:
        found["gflops"] = case.work / timing.median * 1e-6
    if case.traffic:
        found["gbps"] = case.traffic / timing.median * 1e-6
    # The roof is of float32 multiply-adds, which matrix units pass: whoever multiplies bfloat16 may use them, but ours
    # by another name.
    if case.work and roof and (case.facts.get("dtype") != "bfloat16" or timing.form.startswith("gistkit avx")):
        found["flop_share"] = found["gflops"] / roof.peak(timing.form)
    if case.traffic and roof:
        found["read_share"] = found["gbps"] / roof.read_gbps
    return found


def line(timing: Timing, first: str, found: Mapping[str, float]) -> str:
    """A row of the printed table."""
    text = f"  {timing.form:36} {timing.median:10.3f} ms  ({timing.low:.3f} to {timing.high:.3f})"
    text += f"  {found['ratio']:7.2f} x {first}"
    for rate, unit, share, limit in (
        ("gflops", "GF/s visible", "flop_share", "FMA roof"),
        ("gbps", "GB/s", "read_share", "read roof"),
    ):
        if rate in found:
            text += f"  {found[rate]:8.1f} {unit}"
        if share in found:
            text += f" = {found[share]:.0%} of the {limit}"
    return text


def run(
    suite: str,
    cases: Sequence[Case],
    options: argparse.Namespace,
    *,
    seconds: float = 5.0,
    least: int = 5,
    roof: Roof | None = None,
) -> list[Timing]:
    """Times every case, prints each as it is done, and writes the files that were asked for.

    Args:
        cases: what is timed.
        seconds: time for a case after its warm-up; a tenth of it with --quick.
        least: rounds that every contender takes part in; three with --quick.
        roof: the machine's limits, for shares of them.
    """
    if options.quick:
        seconds, least = seconds / 10, 3
    found = begin(suite, options)
    path = output(options)
    earlier = suites.read(path).get(suite) if path and options.append else None
    if earlier and earlier["machine"] != found:
        raise SystemExit(
            f"--append: expected {suite} in {path} to be of this machine and commit, got {earlier['machine']}"
        )
    if roof and earlier:
        roof = roof.best_of(Roof(**earlier["roof"]))
    if roof:
        print("\n".join(roof_lines(roof)))
    timings: list[Timing] = []
    for case in tqdm(cases, desc=suite, unit="case", dynamic_ncols=True):
        torch.manual_seed(0)
        torch.compiler.reset()
        tqdm.write(f"\n{case.name}")
        turns = take_turns(case.name, case.make(), seconds=seconds, least=least)
        for timing in turns:
            tqdm.write(line(timing, turns[0].form, figures(case, timing, turns[0], roof)))
        timings += turns
    if path:
        content: dict[str, object] = {"machine": found}
        if roof:
            content["roof"] = asdict(roof)
        content["cases"] = [
            {"name": case.name, "work": case.work, "traffic": case.traffic, **case.facts} for case in cases
        ]
        content["milliseconds"] = [asdict(timing) for timing in timings]
        if earlier:
            again = {case.name for case in cases}
            content["cases"] = [case for case in earlier["cases"] if case["name"] not in again] + content["cases"]
            kept = [timing for timing in earlier["milliseconds"] if timing["case"] not in again]
            content["milliseconds"] = kept + content["milliseconds"]
        write(suite, content, options)
    return timings
