"""SeqPE beside other position encodings beyond the length of training: the studies `length` and `retrieval`, a file a
run in benchmarks/results/length and benchmarks/results/retrieval.

Runs that are there are left out. Several of these may work side by side, with OMP_NUM_THREADS=1 each: a run that one
has begun the others leave out (one that was interrupted is begun anew once its folder in --work is gone).

example: python benchmarks/extrapolation.py --study length --methods rope-1e4,alibi,seqpe-bias --seeds 0,1,2
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import harness
import runs

from gistkit.cli.study_length import ABLATIONS, ENCODINGS
from gistkit.studies import extrapolation, extrapolation_report, length, retrieval
from gistkit.train.data import load_corpus

RESULTS = {study: harness.ROOT / "benchmarks" / "results" / study for study in ("length", "retrieval")}
READ = {"length": extrapolation_report.read_length, "retrieval": extrapolation_report.read_retrieval}
DRAW = {"length": extrapolation_report.draw_length, "retrieval": extrapolation_report.draw_retrieval}


def read_runs(study: str) -> dict[str, list[runs.Found]]:
    """The committed runs of a study, with recipe and machine, by preset and number of steps, such as short-1000."""
    return runs.read(RESULTS[study], READ[study])


def main() -> int:
    """Makes the runs asked for that are missing, or draws those that are there."""
    presets = set(length.PRESETS) & set(retrieval.PRESETS)
    parser = runs.parser(__doc__, presets, (*ENCODINGS, *ABLATIONS), Path("runs/extrapolation"))
    parser.add_argument("--study", default="length", choices=sorted(RESULTS), help="default: %(default)s")
    options = parser.parse_args()
    study = options.study
    options.work = options.work / study
    if options.draw:
        for name, found in read_runs(study).items():
            pictures = DRAW[study](RESULTS[study], [run for run, *_ in found], prefix=f"{name}-")
            arms = ("seqpe-bias-no-delta", "seqpe-bias") if study == "length" else ()
            states = {arm: path for arm in arms if (path := options.work / name / f"{arm}-0.safetensors").exists()}
            if states:
                picture = RESULTS[study] / f"{name}-similarity.png"
                pictures.append(extrapolation_report.draw_embeddings(picture, found[0][1], states))
            print("\n".join(map(str, pictures)))
        return 0
    arms = extrapolation.arms(options.methods.split(","))
    if study == "length":
        recipe = length.PRESETS[options.preset]
        recipe = replace(recipe, steps=options.steps or recipe.steps)
        corpus = load_corpus()
        runs.make(
            options,
            recipe,
            arms,
            RESULTS[study],
            lambda arm, seed, work, bar: length.train(recipe, arm, seed, corpus, work, device=options.device, bar=bar),
            lambda path, run, machine: extrapolation_report.write_length(path, [run], recipe, corpus, machine),
        )
    else:
        questions = retrieval.PRESETS[options.preset]
        questions = replace(questions, steps=options.steps or questions.steps)
        runs.make(
            options,
            questions,
            arms,
            RESULTS[study],
            lambda arm, seed, work, bar: retrieval.train(questions, arm, seed, work, device=options.device, bar=bar),
            lambda path, run, machine: extrapolation_report.write_retrieval(path, [run], questions, machine),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
