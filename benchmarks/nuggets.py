"""Which tokens should stand for a text: the study `nuggets`, a file a run in benchmarks/results/nuggets.

Runs that are there are left out. Several of these may work side by side, with OMP_NUM_THREADS=1 each: a run that one
has begun the others leave out (one that was interrupted is begun anew once its folder in --work is gone).

example: python benchmarks/nuggets.py --tasks lm --methods learned,strided,compressive --seeds 0,1,2
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import harness
import runs

from gistkit.studies import nuggets, nuggets_report, nuggets_runs
from gistkit.train.data import load_corpus

RESULTS = harness.ROOT / "benchmarks" / "results" / "nuggets"


def read_runs(folder: Path = RESULTS) -> dict[str, list[runs.Found]]:
    """The committed runs, with recipe and machine, by preset and number of steps, such as short-100."""
    return runs.read(folder, nuggets_report.read_json)


def main() -> int:
    """Makes the runs asked for that are missing, or draws those that are there."""
    parser = runs.parser(__doc__, nuggets.PRESETS, nuggets.LM_ARMS, Path("runs/nuggets"))
    parser.add_argument("--tasks", default=",".join(nuggets.TASKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--ratios", default="4,8", help="of reconstruction, comma-separated (default: %(default)s)")
    options = parser.parse_args()
    if options.draw:
        for name, found in read_runs().items():
            pictures = nuggets_report.draw(RESULTS, [run for run, *_ in found], prefix=f"{name}-")
            print("\n".join(map(str, pictures)))
        return 0
    recipe = nuggets.PRESETS[options.preset]
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    corpus = load_corpus(tokenizer=nuggets.tokenizer(recipe))
    ratios = [int(ratio) for ratio in options.ratios.split(",")]
    runs.make(
        options,
        recipe,
        nuggets.arms(recipe, options.tasks.split(","), options.methods.split(","), ratios),
        RESULTS,
        lambda arm, seed, work, bar: nuggets_runs.train(
            recipe, arm, seed, corpus, work, device=options.device, bar=bar
        ),
        lambda path, run, machine: nuggets_report.write_json(path, [run], recipe, corpus, machine),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
