"""Methods that compress a context in place, a file a run in benchmarks/results/in_place.

Runs that are there are left out. Several of these may work side by side, with OMP_NUM_THREADS=1 each: a run that one
has begun the others leave out (one that was interrupted is begun anew once its folder in --work is gone).

example: python benchmarks/in_place.py --methods no,full,avgpool,gistpool --ratios 2,5 --seeds 0,1,2
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import harness
import runs

from gistkit.studies import in_place, in_place_report, in_place_runs
from gistkit.train.data import load_corpus

RESULTS = harness.ROOT / "benchmarks" / "results" / "in_place"


def read_runs(folder: Path = RESULTS) -> dict[str, list[runs.Found]]:
    """The committed runs, with recipe and machine, by preset and number of steps, such as short-100."""
    return runs.read(folder, in_place_report.read_json)


def main() -> int:
    """Makes the runs asked for that are missing, or draws those that are there."""
    parser = runs.parser(__doc__, in_place.PRESETS, in_place.METHODS, Path("runs/in_place"))
    parser.add_argument("--ratios", default="1,2,5,10", help="comma-separated (default: %(default)s)")
    options = parser.parse_args()
    if options.draw:
        for name, found in read_runs().items():
            pictures = in_place_report.draw(RESULTS, [run for run, *_ in found], prefix=f"{name}-")
            print("\n".join(map(str, pictures)))
        return 0
    recipe = in_place.PRESETS[options.preset]
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    corpus = load_corpus()
    runs.make(
        options,
        recipe,
        in_place.arms(options.methods.split(","), [int(ratio) for ratio in options.ratios.split(",")]),
        RESULTS,
        lambda arm, seed, work, bar: in_place_runs.train(
            recipe, arm, seed, corpus, work, device=options.device, bar=bar
        ),
        lambda path, run, machine: in_place_report.write_json(path, [run], recipe, corpus, machine),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
