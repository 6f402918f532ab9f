"""Reconstruction by length: BLEU of compressors trained on SmolLM2-135M, a line each in results/lengths.jsonl.

Contexts of many lengths are trained on and held-out ones of some lengths reconstructed (Dodo, Figure 4, whose ICAE has
as many memory tokens whatever the length). Compressors that are there are left out; training that was interrupted
goes on. Several of these may work side by side on different arms, with OMP_NUM_THREADS=1 each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fitted
import harness

from gistkit.hf.smollm2 import load_smollm2
from gistkit.train.data import load_corpus
from gistkit_lab.evaluate.lengths import bleu_by_length
from gistkit_lab.viz import draw_bleu_by_length

RESULTS = harness.ROOT / "benchmarks" / "results" / "lengths.jsonl"
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
    """What the committed file holds, by arm."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = {run["arm"]: run for run in map(json.loads, lines)}
    return {arm: found[arm] for arm in ARMS if arm in found}


def draw(path: Path) -> Path:
    """The picture of BLEU against length."""
    series = {
        found["title"]: {one["length"]: [one["bleu4"]] for one in found["lengths"]} for found in read_runs().values()
    }
    draw_bleu_by_length(series).savefig(path, dpi=150)
    return path


def main() -> int:
    """Makes the runs that are missing, or draws those that are there."""
    parser = harness.command(__doc__, "python benchmarks/lengths.py --arms dodo-10x,dodo-20x")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=360, help="of training (default: %(default)s)")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no", help="of training (default: %(default)s)")
    parser.add_argument("--contexts", type=int, default=48, help="held-out ones a length (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/lengths"), help="for states (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="make no runs; draw those that are there")
    options = parser.parse_args()
    arms = options.arms.split(",")
    if unknown := sorted({*arms} - {*ARMS}):
        parser.error(f"--arms: expected some of {', '.join(ARMS)}, got {unknown[0]}")
    if options.draw:
        if not read_runs():
            parser.error(f"--draw: expected runs in {RESULTS}, got none")
        print(draw(options.draw))
        return 0
    tokenizer = load_smollm2()[1]
    corpus = load_corpus(tokenizer=tokenizer)
    contexts = [row for length in LENGTHS for row in corpus.chunks(length, count=options.contexts).tolist()]
    recipe, there = {"steps": options.steps, **PASSAGES}, read_runs()
    training = {"preset": fitted.PRESET, **recipe, "precision": options.precision}
    fitted.check_same(
        RESULTS,
        [(run["training"], sum(one["contexts"] for one in run["lengths"])) for run in there.values()],
        (training, len(contexts)),
    )
    for arm in arms:
        if arm in there:
            continue
        method, given = ARMS[arm]
        folder = options.work / f"{arm}-{options.steps}"
        compressor = fitted.fitted(folder, method, recipe, {**given, "losses": ["ae"]}, precision=options.precision)
        found = bleu_by_length(compressor, contexts, LENGTHS, tokenizer=tokenizer)
        content = {
            "arm": arm,
            "suite": "lengths",
            "title": compressor.title,
            "machine": harness.environment(),
            "text": [corpus.name, corpus.digest],
            "training": training,
            "lengths": [asdict(one) for one in found],
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(content, separators=(",", ":")) + "\n")
        print(f"{compressor.title}: " + ", ".join(f"{one.length} tokens {one.bleu4:.1f}" for one in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
