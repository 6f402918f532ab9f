"""How long the demo's three arms train: one after another on two threads, and side by side on one thread each; with
nothing beside them, and beside a process that keeps a core busy. The four take turns, so that whatever else the machine
does hits them alike; shown are medians, and the ratios that the demo is held to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import harness

from gistkit.evaluate.report import format_table
from gistkit.train.data import load_corpus
from gistkit_lab.studies.epl import STUDIED, STUDY, Recipe
from gistkit_lab.studies.reconstruction import Run
from gistkit_lab.studies.runner import run_jobs, threads
from gistkit_lab.studies.study import Job, StudyPlan, jobs


class Threaded(type(STUDY)):  # type: ignore[misc]
    """The demo as it was: torch's threads are left as they are."""

    def small(self, recipe: object) -> bool:
        return False


@contextmanager
def busy(nice: int) -> Iterator[None]:
    """A process that counts all the time."""
    code = f"import os\nos.nice({nice})\nwhile True: sum(range(100000))"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(plan: StudyPlan, asked: list[Job], side_by_side: bool) -> tuple[float, float]:
    """Seconds of training, from the first step of all to the last of any, and with the start and the measuring."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, threads(2):
        study, count = (STUDY, len(asked)) if side_by_side else (Threaded(), 1)
        runs: list[Run] = [run for _, run in run_jobs(study, plan, asked, Path(folder), processes=count)]
    trained = [run.seconds for run in runs]
    return max(trained) if side_by_side else sum(trained), time.perf_counter() - begun


def main() -> int:
    """Measures and prints."""
    parser = harness.command(__doc__, "python benchmarks/demo.py --steps 60 --rounds 3")
    parser.add_argument("--steps", type=int, default=60, help="of each arm (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--nice", type=int, default=0, help="of the busy process (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="ten steps, one round")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds = 10, 1
    recipe = Recipe(steps=options.steps, eval_every=options.steps, eval_chunks=2, final_chunks=4)
    plan = StudyPlan(recipe, jobs(STUDIED, 1), source=load_corpus())
    found: dict[tuple[bool, bool], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for beside in (False, True):
            for side_by_side in (False, True):
                with busy(options.nice) if beside else nullcontext():
                    one = seconds(plan, list(plan.jobs), side_by_side)
                found.setdefault((side_by_side, beside), []).append(one)
                print(f"load {os.getloadavg()[0]:.1f}, {side_by_side=}, {beside=}: {one[0]:.1f} s", file=sys.stderr)
    rows = [["three arms", "beside", "training", "in all"]]
    middle = {key: [median(times) for times in zip(*each, strict=True)] for key, each in found.items()}
    for (side_by_side, beside), (training, whole) in middle.items():
        how = "side by side, one thread each" if side_by_side else "one after another, two threads"
        rows.append([how, "a busy process" if beside else "nothing", f"{training:.1f} s", f"{whole:.1f} s"])
    print(format_table(rows))
    print(f"busy / quiet, side by side: {middle[True, True][0] / middle[True, False][0]:.2f} (at most 2)")
    quiet = middle[True, False][0] / middle[False, False][0]
    print(f"side by side / one after another, quiet: {quiet:.2f} (at most 0.7)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
