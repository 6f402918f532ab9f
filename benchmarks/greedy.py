"""How near nuggets are to the best ones: the study `greedy`, a line a selection in benchmarks/results/greedy.jsonl.

A Dodo is trained on SmolLM2-135M with each way of selecting, to reconstruct and to read on; then its nuggets in
held-out passages are swapped one by one for better ones. Strided and random nuggets tell how many stay where none was
chosen. Selections that are there are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fitted
import harness

from gistkit.compress import Dodo
from gistkit.hf.smollm2 import load_smollm2
from gistkit.train.data import load_corpus
from gistkit_lab import digests
from gistkit_lab.studies import greedy, results
from gistkit_lab.studies.registry import read

RESULTS = harness.ROOT / "benchmarks" / "results" / "greedy.jsonl"
SELECTIONS = ("learned", "strided", "random")
RATIO = 8
# A context of the size trained on, some tokens that are read, and those whose loss decides; the paper's is for a GPU.
STUDY = greedy.Recipe(context=64, read=16, asked=32)
TRAINING: dict[str, Any] = {"preset": fitted.PRESET, "losses": ["ae", "lm"]}


def main() -> int:
    """Makes the runs that are missing."""
    parser = harness.command(__doc__, "python benchmarks/greedy.py --selections learned,random --passages 16")
    parser.add_argument(
        "--selections", default=",".join(SELECTIONS), help="some of these, comma-separated (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=60, help="of training (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=16, help="held-out ones, at most (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/greedy"), help="for states (default: %(default)s)")
    options = parser.parse_args()
    corpus = load_corpus(tokenizer=load_smollm2()[1])
    passages = greedy.passages([corpus.held_out.tolist()], STUDY.length, options.passages)
    saved = read(RESULTS) if RESULTS.exists() else []
    training = {"steps": options.steps, **TRAINING}
    # The table has the number of passages.
    fitted.check_same(RESULTS, [(one.run.training, one.recipe) for one in saved], (training, STUDY))
    there = {one.run.settings["selection"] for one in saved}
    for selection in options.selections.split(","):
        if selection in there:
            continue
        chosen = {"ratio": RATIO, "selection": selection, "losses": TRAINING["losses"]}
        folder = options.work / f"{selection}-{options.steps}"
        compressor = fitted.fitted(folder, "dodo", {"steps": options.steps}, chosen)
        if not isinstance(compressor, Dodo):
            raise TypeError(f"{folder}: expected a Dodo, got {type(compressor).__name__}")
        found = greedy.study(compressor, passages, STUDY)
        run = greedy.Run(compressor.title, compressor.settings, found, training, digests.of_compressor(compressor))
        results.append(RESULTS, results.line("greedy", run, STUDY, corpus, harness.environment()))
        print(greedy.STUDY.table([run], STUDY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
