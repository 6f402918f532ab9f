"""Which tokens should stand for a text: the study `nuggets`, a file a run in benchmarks/results/nuggets.

Runs that are there are left out. Several of these may work side by side, with OMP_NUM_THREADS=1 each: a run that one
has begun the others leave out (one that was interrupted is begun anew once its folder in --work is gone).

example: python benchmarks/nuggets.py --tasks lm --methods learned,strided,compressive --seeds 0,1,2
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import harness
from tqdm import tqdm

from gistkit.studies import nuggets, nuggets_report, nuggets_runs
from gistkit.train.data import load_corpus

RESULTS = harness.ROOT / "benchmarks" / "results" / "nuggets"


Found = tuple[nuggets_runs.Run, nuggets.Recipe, dict[str, object]]


def read_runs(folder: Path = RESULTS) -> dict[str, list[Found]]:
    """The committed runs, with recipe and machine, by preset and number of steps, such as short-100."""
    found: dict[str, list[Found]] = {}
    for path in sorted(folder.glob("*.json")):
        name = "-".join(path.name.split("-")[:2])
        machine = json.loads(path.read_text())["machine"]
        runs, recipe = nuggets_report.read_json(path)
        found.setdefault(name, []).extend((run, recipe, machine) for run in runs)
    return found


def main() -> int:
    """Makes the runs asked for that are missing, or draws those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="short", choices=sorted(nuggets.PRESETS), help="default: %(default)s")
    parser.add_argument("--tasks", default=",".join(nuggets.TASKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--methods", default=",".join(nuggets.LM_ARMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--ratios", default="4,8", help="of reconstruction, comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0", help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/nuggets"), help="for states (default: %(default)s)")
    parser.add_argument("--draw", action="store_true", help="make no runs; draw those that are there")
    options = parser.parse_args()
    if options.draw:
        for name, found in read_runs().items():
            pictures = nuggets_report.draw(RESULTS, [run for run, *_ in found], prefix=f"{name}-")
            print("\n".join(map(str, pictures)))
        return 0
    recipe = nuggets.PRESETS[options.preset]
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    corpus = load_corpus(tokenizer=nuggets.tokenizer(recipe))
    RESULTS.mkdir(parents=True, exist_ok=True)
    work = options.work / f"{options.preset}-{recipe.steps}"
    ratios = [int(ratio) for ratio in options.ratios.split(",")]
    arms = nuggets.arms(recipe, options.tasks.split(","), options.methods.split(","), ratios)
    for seed in map(int, options.seeds.split(",")):
        for arm in arms:
            name = f"{options.preset}-{recipe.steps}-{arm.name}-{seed}"
            path, begun = RESULTS / f"{name}.json", work / f"{arm.name}-{seed}"
            if path.exists() or begun.exists():
                continue
            begun.mkdir(parents=True)
            with tqdm(total=recipe.steps, desc=name, unit="step", dynamic_ncols=True) as bar:
                run = nuggets_runs.train(recipe, arm, seed, corpus, work, device=options.device, bar=bar)
            nuggets_report.write_json(path, [run], recipe, corpus, harness.environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
