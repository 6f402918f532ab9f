"""Runs the study `pooling` over its axes and keeps the figures for the README.

From one window of two and one head, the heads change, or the ratio, or the length. The settings come in two parts, a
file each, of 66 and 30 runs, most of half a minute to a minute. An interrupted run goes on with --resume; --keep keeps
what is finished so far.

example: python benchmarks/pooling.py --part pooling-lengths --resume
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from gistkit.cli.study_pooling import run_settings
from gistkit.studies import pooling_report
from gistkit.studies.pooling import grid
from gistkit.studies.pooling_inputs import INPUTS
from gistkit.studies.pooling_layer import CONTEXTS, MASKS, Recipe, Setting

RESULTS = Path(__file__).resolve().parent / "results"
CELLS = {"inputs": INPUTS, "mask": MASKS, "context": CONTEXTS}


HEADS: dict[str, Any] = {"heads": [(8, 8), (8, 4)]}
COPYING: dict[str, Any] = {"ratio": [1]}
WIDE: dict[str, Any] = {"ratio": [8], "length": [40]}
LONG: dict[str, Any] = {"ratio": [2], "length": [40]}
# What changes from one window of two and one head, for which inputs, by file.
PARTS: dict[str, list[dict[str, Any]]] = {
    "pooling": [
        {"seeds": 2},
        *({"inputs": ["vocabulary"], **axis} for axis in (HEADS, COPYING, WIDE)),
        {"inputs": ["sphere"], "heads": [(8, 8)]},
    ],
    "pooling-lengths": [
        {"inputs": ["vocabulary", "sphere"], **LONG},
        *({"inputs": ["sphere"], **axis} for axis in (HEADS, COPYING, WIDE)),
    ],
}


def settings(part: str) -> list[Setting]:
    """What a part runs, in this order; each setting once, in the first part that has it."""
    found: dict[Setting, str] = {}
    for name, grids in PARTS.items():
        for axes in grids:
            for setting in grid(**CELLS | axes):
                found.setdefault(setting, name)
    return [setting for setting, name in found.items() if name == part]


def keep(folder: Path, part: str, found: dict[str, object]) -> None:
    """Writes the file of a part, without the numbers of attention maps, and of the first part their pictures."""
    content = json.loads((folder / "results.json").read_text())
    content["machine"] = found
    for run in content["runs"]:
        del run["attention"]
    RESULTS.mkdir(exist_ok=True)
    # A line a run.
    lines = ",\n  ".join(json.dumps(run) for run in content.pop("runs"))
    (RESULTS / f"{part}.json").write_text(f'{json.dumps(content, indent=1)[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    if part != next(iter(PARTS)):
        return
    runs, _ = pooling_report.read_json(folder / "results.json")
    for path in pooling_report.draw(folder, runs):
        shutil.copyfile(path, RESULTS / f"pooling-{path.name}")


def main() -> int:
    """Runs the settings of a part, or with --quick a few steps of a few, which are kept nowhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="pooling", choices=PARTS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the part's runs (default: runs/PART)")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out and go on where they stopped")
    parser.add_argument("--keep", action="store_true", help="train nothing: keep what --out holds")
    parser.add_argument("--quick", action="store_true", help="25 steps of a few settings, kept nowhere: does it run?")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            few = [setting for setting in settings("pooling") if setting.inputs == "sphere" and setting.seed == 0][:6]
            return run_settings(Recipe(steps=25), few, Path(folder))
    out = options.out or Path("runs") / options.part
    machine = out / "machine.json"
    if not options.keep:
        out.mkdir(parents=True, exist_ok=True)
        if not (options.resume and machine.exists()):
            machine.write_text(json.dumps(harness.environment()))
        if status := run_settings(Recipe(), settings(options.part), out, resume=options.resume):
            return status
    keep(out, options.part, json.loads(machine.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
