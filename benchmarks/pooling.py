"""Runs the study `pooling` over its axes and keeps the figures for the README.

One axis changes at a time: heads, ratio and length for each kind of inputs, then the learning rate. An interrupted run
goes on with --resume; --keep keeps what is finished so far.

example: python benchmarks/pooling.py --out runs/pooling-all --resume
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import harness

from gistkit.cli.study_pooling import run_settings
from gistkit.studies import pooling_report
from gistkit.studies.pooling import grid
from gistkit.studies.pooling_inputs import INPUTS
from gistkit.studies.pooling_layer import CONTEXTS, MASKS, Recipe, Setting

RESULTS = Path(__file__).resolve().parent / "results"
CELLS = {"inputs": INPUTS, "mask": MASKS, "context": CONTEXTS}


def settings() -> list[Setting]:
    """What is run, in this order; each setting once."""
    axes = [
        {"heads": [(8, 8), (8, 4)]},
        {"ratio": [1]},
        {"ratio": [8], "length": [40]},
        {"ratio": [2], "length": [40]},
    ]
    grids = [grid(seeds=2, **CELLS)]
    # The vocabulary first, on which the cells differ most.
    for inputs in ("vocabulary", "sphere", "sphere+common"):
        grids += [grid(**CELLS | axis | {"inputs": [inputs]}) for axis in axes]
    grids.append(grid(seeds=2, learning_rate=[3e-3], **CELLS))
    return list(dict.fromkeys(setting for one in grids for setting in one))


def keep(folder: Path, found: dict[str, object]) -> None:
    """Writes pooling.json, without the attention maps' numbers, and the pictures of the attention."""
    content = json.loads((folder / "results.json").read_text())
    content["machine"] = found
    for run in content["runs"]:
        del run["attention"]
    RESULTS.mkdir(exist_ok=True)
    # A line a run.
    lines = ",\n  ".join(json.dumps(run) for run in content.pop("runs"))
    (RESULTS / "pooling.json").write_text(f'{json.dumps(content, indent=1)[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    runs, _ = pooling_report.read_json(folder / "results.json")
    for path in pooling_report.draw(folder, runs):
        shutil.copyfile(path, RESULTS / f"pooling-{path.name}")


def main() -> int:
    """Runs all settings, or with --quick a few steps of a few, which are kept nowhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pooling-all"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out and go on where they stopped")
    parser.add_argument("--keep", action="store_true", help="train nothing: keep what --out holds")
    parser.add_argument("--quick", action="store_true", help="25 steps of a few settings, kept nowhere: does it run?")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            few = [setting for setting in settings() if setting.inputs == "sphere" and setting.seed == 0][:6]
            return run_settings(Recipe(steps=25), few, Path(folder))
    machine = options.out / "machine.json"
    if not options.keep:
        options.out.mkdir(parents=True, exist_ok=True)
        if not (options.resume and machine.exists()):
            machine.write_text(json.dumps(harness.environment()))
        if status := run_settings(Recipe(), settings(), options.out, resume=options.resume):
            return status
    keep(options.out, json.loads(machine.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
