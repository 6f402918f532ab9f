"""Reconstruction by length: BLEU of compressors trained on SmolLM2-135M, a file each in benchmarks/results/lengths.

Contexts of many lengths are trained on and held-out ones of some lengths reconstructed (Dodo, Figure 4, whose ICAE has
as many memory tokens whatever the length). Compressors whose file is there are left out; training that was interrupted
goes on. Several of these may work side by side on different arms, with OMP_NUM_THREADS=1 each.

example: python benchmarks/lengths.py --arms dodo-10x,dodo-20x
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fitted
import harness

from gistkit.evaluate import bleu_by_length
from gistkit.hf.smollm2 import load_smollm2
from gistkit.train.data import load_corpus
from gistkit.viz import draw_bleu_by_length

RESULTS = harness.ROOT / "benchmarks" / "results" / "lengths"
LENGTHS = (32, 64, 96, 128)
# Half of a passage is its context.
PASSAGES = {"min_length": 2 * LENGTHS[0], "max_length": 2 * LENGTHS[-1]}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dodo-10x": ("dodo", {"ratio": 10}),
    "dodo-20x": ("dodo", {"ratio": 20}),
    # Of contexts of the greatest length.
    "icae-8x": ("icae", {"ratio": 8, "chunk": LENGTHS[-1]}),
}


def read_runs() -> dict[str, dict[str, Any]]:
    """What the committed files hold, by arm."""
    paths = {arm: RESULTS / f"{arm}.json" for arm in ARMS}
    return {arm: json.loads(path.read_text()) for arm, path in paths.items() if path.exists()}


def draw() -> Path:
    """The picture of BLEU against length, beside the files."""
    series = {
        found["title"]: {one["length"]: [one["bleu4"]] for one in found["lengths"]} for found in read_runs().values()
    }
    path = RESULTS / "bleu.png"
    draw_bleu_by_length(series).savefig(path, dpi=150)
    return path


def main() -> int:
    """Makes the files that are missing, or draws those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=360, help="of training (default: %(default)s)")
    parser.add_argument("--contexts", type=int, default=48, help="held-out ones a length (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/lengths"), help="for states (default: %(default)s)")
    parser.add_argument("--draw", action="store_true", help="make no runs; draw those that are there")
    options = parser.parse_args()
    arms = options.arms.split(",")
    if unknown := sorted({*arms} - {*ARMS}):
        parser.error(f"--arms: expected some of {', '.join(ARMS)}, got {unknown[0]}")
    if options.draw:
        if not read_runs():
            parser.error(f"--draw: expected files in {RESULTS}, got none")
        print(draw())
        return 0
    tokenizer = load_smollm2()[1]
    corpus = load_corpus(tokenizer=tokenizer)
    contexts = [row for length in LENGTHS for row in corpus.chunks(length, count=options.contexts).tolist()]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for arm in arms:
        path = RESULTS / f"{arm}.json"
        if path.exists():
            continue
        method, given = ARMS[arm]
        recipe = {"steps": options.steps, **PASSAGES}
        compressor = fitted.fitted(options.work / f"{arm}-{options.steps}", method, recipe, {**given, "losses": ["ae"]})
        found = bleu_by_length(compressor, contexts, LENGTHS, tokenizer=tokenizer)
        content = {
            "suite": "lengths",
            "title": compressor.title,
            "machine": harness.environment(),
            "text": [corpus.name, corpus.digest],
            "training": {"preset": fitted.PRESET, **recipe},
            "lengths": [asdict(one) for one in found],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{compressor.title}: " + ", ".join(f"{one.length} tokens {one.bleu4:.1f}" for one in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
