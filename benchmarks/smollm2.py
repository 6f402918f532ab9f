"""Position layouts on SmolLM2-135M, a file a run in benchmarks/results/smollm2; runs that are there are left out.

Several of these may work side by side, with OMP_NUM_THREADS=1 each: a run that one has begun the others leave out
(one that was interrupted is begun anew once its folder in --work is gone).

example: python benchmarks/smollm2.py --method x500 --layouts dpl,epl --seeds 0,1,2
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
from tqdm import tqdm

from gistkit.studies import runs, smollm2
from gistkit.train.data import load_corpus
from gistkit.viz.attention import draw_memory_attention
from gistkit.viz.studies import draw_loss_curves

RESULTS = harness.ROOT / "benchmarks" / "results" / "smollm2"


def read_runs() -> dict[tuple[str, str, float], list[tuple[runs.Run, dict[str, Any], dict[str, Any]]]]:
    """The committed runs with their recipe and machine, by method, preset and learning rate, 500x and DPL first."""
    found: dict[tuple[str, str, float], list[Any]] = {}
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        recipe = content["recipe"]
        key = recipe["method"], path.name.split("-")[1], recipe["learning_rate"]
        found.setdefault(key, []).append((runs.Run(**content["run"]), recipe, content["machine"]))
    order = ("dpl", "upl", "epl", "cpl")
    presets = list(smollm2.PRESETS)
    return {
        key: sorted(found[key], key=lambda one: (order.index(one[0].layout), one[0].seed))
        for key in sorted(found, key=lambda key: (key[0] == "icae", presets.index(key[1]), key[2]))
    }


def draw() -> list[Path]:
    """Curves of every method, preset and learning rate, and the last layer's maps, as PNG files beside the runs."""
    written = []
    for (method, preset, rate), found in read_runs().items():
        name = f"{method}-{preset}-{rate:g}"
        every = [run for run, *_ in found]
        curves = {run.layout: [one.curve for one in every if one.layout == run.layout] for run in every}
        maps = {run.layout: run.attention for run in reversed(every)}
        recipe = found[0][1]
        figures = {
            f"{name}-loss.png": draw_loss_curves(curves, goal=runs.GOAL),
            f"{name}-attention.png": draw_memory_attention(
                dict(reversed(maps.items())), recipe["ratio"], len(every[0].tracking) - 1
            ),
        }
        for file, figure in figures.items():
            figure.savefig(RESULTS / file, dpi=150)
            written.append(RESULTS / file)
    return written


def main() -> int:
    """Makes the runs asked for that are missing, or draws those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="short", choices=sorted(smollm2.PRESETS), help="default: %(default)s")
    parser.add_argument("--method", default="x500", choices=("icae", "x500"), help="default: %(default)s")
    parser.add_argument("--layouts", default="dpl,upl,epl", help="comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0", help="comma-separated (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, help="default: the preset's")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"), help="for states (default: %(default)s)")
    parser.add_argument("--draw", action="store_true", help="make no runs; draw those that are there")
    options = parser.parse_args()
    if options.draw:
        print("\n".join(map(str, draw())))
        return 0
    changes = {"method": options.method}
    if options.learning_rate:
        changes["learning_rate"] = options.learning_rate
    recipe = smollm2.recipe(options.preset, **changes)
    corpus = load_corpus(tokenizer=smollm2.tokenizer(recipe))
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in map(int, options.seeds.split(",")):
        for layout in options.layouts.split(","):
            name = f"{options.method}-{options.preset}-{recipe.learning_rate:g}-{layout}-{seed}"
            path, work = RESULTS / f"{name}.json", options.work / name
            if path.exists() or work.exists():
                continue
            work.mkdir(parents=True)
            with tqdm(total=recipe.steps, desc=name, unit="step", dynamic_ncols=True) as bar:
                run = runs.train(
                    recipe, smollm2.build_compressor, layout, seed, corpus, work,
                    device=options.device, resume=False, bar=bar,
                )  # fmt: skip
            found = asdict(run)
            # The last layer's map is enough to look at, and so are its first digits.
            found["attention"] = [[[round(x, 5) for x in row] for row in layer] for layer in run.attention[-1:]]
            content = {
                "study": "smollm2", "machine": harness.environment(), "text": [corpus.name, corpus.digest],
                "recipe": asdict(recipe), "run": found,
            }  # fmt: skip
            # A line a row of numbers.
            lines = re.sub(r"\[[^\[\]{}\"]+\]", lambda row: " ".join(row[0].split()), json.dumps(content, indent=1))
            path.write_text(lines + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
