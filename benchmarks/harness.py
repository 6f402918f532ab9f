"""What the benchmarks share: contenders that take turns, machine and commit, a table, JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from gistkit.info import machine

Forms = Mapping[str, Callable[[], object]]


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
    """Times all contenders in turn, so that the machine's moods hit them alike; two calls each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for function in forms.values():
        function()
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, function in forms.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return [Timing(case, name, *statistics.quantiles(runs, n=4), len(runs)) for name, runs in times.items()]


def environment() -> dict[str, object]:
    """The machine, the versions, and the commit with a mark if the sources differ from it."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD") or "unknown"
    changed = "+changes" if git("status", "--porcelain", "--", "csrc", "python") else ""
    return {**machine(), "cores": os.cpu_count() or 0, "commit": commit + changed}


def parser(description: str | None, example: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(
        description=description, epilog=f"example: {example}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="a tenth of the time, noisier")
    options.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    return options


def run(
    suite: str,
    cases: Iterable[tuple[str, Callable[[], Forms]]],
    options: argparse.Namespace,
    *,
    seconds: float = 5.0,
) -> list[Timing]:
    """Times every case, prints each as it is done, and writes the JSON that was asked for.

    Args:
        cases: (name, function that makes the contenders); the first contender is ours, and ratios are to it.
        seconds: time for a case; a tenth of it with --quick.
    """
    torch.set_num_threads(options.threads)
    found = environment()
    print(f"{suite}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    timings: list[Timing] = []
    work = list(cases)
    for name, make in tqdm(work, desc=suite, unit="case", dynamic_ncols=True):
        torch.manual_seed(0)
        torch.compiler.reset()
        rows = take_turns(name, make(), seconds=seconds / 10 if options.quick else seconds)
        timings += rows
        tqdm.write(f"\n{name}")
        for row in rows:
            tqdm.write(
                f"  {row.form:28} {row.median:10.3f} ms  ({row.low:.3f} to {row.high:.3f})"
                f"  {row.median / rows[0].median:7.2f} x {rows[0].form}"
            )
    if options.json:
        content = {"suite": suite, "machine": found, "milliseconds": [asdict(timing) for timing in timings]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return timings
