"""`gistkit study nuggets`: which tokens should stand for a text, and whether learning to choose them pays."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, add_device, device, names, positive

PURPOSE = "compare Dodo's learned nuggets with other ways of keeping as many states of a text"
EXAMPLES = """example: gistkit study nuggets --preset quick --tasks lm --methods sliding,compressive,learned,strided
         gistkit study nuggets --preset paper --device cuda --seeds 3 --resume"""
TASKS = ("ae", "lm")
METHODS = (
    "full", "sliding", "truncated", "none", "compressive", "learned", "strided", "random", "delimiters", "frozen"
)  # fmt: skip
PRESETS = ("quick", "short", "paper")
OUT = Path("runs/nuggets")


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "nuggets", run, PURPOSE, EXAMPLES)
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="quick",
        help="quick: a small model from scratch; short: SmolLM2-135M, minutes a run on a CPU; paper: SmolLM2-135M on a "
        "GPU, at the paper's sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--tasks",
        type=names(*TASKS),
        default=list(TASKS),
        help="ae: reconstruct a context; lm: read on (default: both)",
    )
    parser.add_argument(
        "--methods", type=names(*METHODS), default=list(METHODS), help=f"comma-separated (default: {','.join(METHODS)})"
    )
    parser.add_argument(
        "--ratios", type=names("2", "4", "8", "10", "16", "20"), default=["4", "8"], help="of ae (default: 4,8)"
    )
    parser.add_argument("--text", type=Path, help="text file to train on (default: the standard library's topics)")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--steps", type=positive, help="training steps a run (default: the preset's)")
    add_device(parser)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run in --out stopped")
    parser.set_defaults(if_interrupted="; --resume goes on from the last evaluation")


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints the tables and leaves results and pictures in --out."""
    # All that the end needs is loaded before the training starts.
    from dataclasses import replace

    from gistkit.evaluate.metrics import need
    from gistkit.evaluate.report import format_table
    from gistkit.info import machine
    from gistkit.studies import nuggets
    from gistkit.studies import nuggets_report as report
    from gistkit.studies.nuggets_runs import run_study
    from gistkit.train.data import load_corpus
    from gistkit.viz import nuggets as _  # noqa: F401

    need("sacrebleu")
    where, out = device(arguments.device), arguments.out
    recipe = nuggets.PRESETS[arguments.preset]
    if arguments.steps:
        recipe = replace(recipe, steps=arguments.steps)
    corpus = load_corpus(arguments.text, tokenizer=nuggets.tokenizer(recipe))
    arms = nuggets.arms(recipe, arguments.tasks, arguments.methods, [int(ratio) for ratio in arguments.ratios])
    if not arms:
        raise ValueError(f"--methods: expected some of {', '.join(nuggets.SELECTIONS)} for the task ae, got others")
    print(
        f"Nuggets of contexts of {recipe.context} and texts of {recipe.length} {corpus.unit}, {len(arms)} arms of "
        f"{recipe.steps} steps; text {corpus.name}, {corpus.digest}"
    )
    runs = []
    for found in run_study(
        recipe, arms, list(range(arguments.seeds)), corpus, out, device=where, resume=arguments.resume
    ):
        runs.append(found)
        report.write_json(out / "results.json", runs, recipe, corpus, machine())
    if "ae" in arguments.tasks:
        print(f"\nA context, reconstructed from its nuggets:\n{format_table(report.reconstruction_rows(runs))}")
    if "lm" in arguments.tasks:
        print(f"\nA text, continued from as many states:\n{format_table(report.language_rows(runs))}")
    for task, what in (("ae", "reconstruct"), ("lm", "read on")):
        rows = report.type_rows(runs, task)
        if len(rows) > 1:
            print(f"\nWhat the scorer that learned to {what} selects:\n{format_table(rows)}")
    print(f"\n{report.PAPER}")
    pictures = report.draw(out, runs)
    print("\nWritten: " + ", ".join(str(path) for path in [out / "results.json", *pictures]))
    return 0
