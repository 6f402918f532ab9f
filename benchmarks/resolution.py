"""SeqPE beside other position encodings on images larger than those of training: the study `resolution`, a file a run
in benchmarks/results/resolution/DATA.

Runs that are there are left out; see extrapolation.py.

example: python benchmarks/resolution.py --data fashion-mnist --methods nope,rope-2d-mix,seqpe-mul --seeds 0,1,2
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import harness
import runs

from gistkit.studies import resolution, resolution_report
from gistkit.studies.images import load_images

RESULTS = harness.ROOT / "benchmarks" / "results" / "resolution"
DATA = ("digits", "fashion-mnist")
# Those that have an embedding of each position, side by side in a picture.
EMBEDDED = ("learned-2d", "seqpe-mul")


def read_runs() -> dict[tuple[str, str], list[runs.Found]]:
    """The committed runs, with recipe and machine, by data and by preset and number of steps, such as short-1500."""
    return {
        (data, name): found
        for data in DATA
        for name, found in runs.read(RESULTS / data, resolution_report.read_json).items()
    }


def main() -> int:
    """Makes the runs asked for that are missing, or draws those that are there."""
    parser = runs.parser(__doc__, resolution.PRESETS, resolution.ARMS, Path("runs/resolution"))
    parser.add_argument("--data", default="digits", choices=DATA, help="default: %(default)s")
    options = parser.parse_args()
    if options.draw:
        for (data, name), found in read_runs().items():
            pictures = resolution_report.draw(RESULTS / data, [run for run, *_ in found], prefix=f"{name}-")
            work = options.work / data / name
            states = {arm: path for arm in EMBEDDED if (path := work / f"{arm}-0.safetensors").exists()}
            if states:
                picture = RESULTS / data / f"{name}-similarity.png"
                pictures.append(resolution_report.draw_embeddings(picture, found[0][1], states))
            print("\n".join(map(str, pictures)))
        return 0
    options.work = options.work / options.data
    images = load_images(options.data)
    recipe = resolution.PRESETS[options.preset].fitted(images)
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    runs.make(
        options,
        recipe,
        resolution.arms(options.methods.split(",")),
        RESULTS / options.data,
        lambda arm, seed, work, bar: resolution.train(recipe, arm, seed, images, work, device=options.device, bar=bar),
        lambda path, run, machine: resolution_report.write_json(path, [run], recipe, images, machine),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
