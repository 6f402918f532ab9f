"""`gistkit study in-place`: answering from a context that each method compresses in place."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, add_device, device, names, positive

PURPOSE = "compare Gist, AvgPool, GistPool and their relatives at answering from a compressed context"
EXAMPLES = """example: gistkit study in-place --preset quick --methods no,full,avgpool --ratios 2
         gistkit study in-place --preset paper --device cuda --seeds 3 --resume"""
METHODS = ("no", "full", "gist", "offset-gist", "sep-offset-gist", "avgpool", "gistpool", "gistpool-means")
OTHER_METHODS = ("sep-gist", "gist-pool", "sep-gist-pool", "offset-gist-pool")
RATIOS = ("1", "2", "5", "10")
PRESETS = ("quick", "short", "paper")
OUT = Path("runs/in-place")


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "in-place", run, PURPOSE, EXAMPLES)
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="quick",
        help="quick: a small model from scratch; short: SmolLM2-135M, minutes a run on a CPU; paper: SmolLM2-135M on a "
        "GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        type=names(*METHODS, *OTHER_METHODS),
        default=list(METHODS),
        help="comma-separated; gistpool-means is GistPool with gists that begin as means of their windows, and there "
        f"are {', '.join(OTHER_METHODS)} (default: {','.join(METHODS)})",
    )
    parser.add_argument(
        "--ratios", type=names(*RATIOS), default=list(RATIOS), help=f"comma-separated (default: {','.join(RATIOS)})"
    )
    parser.add_argument("--text", type=Path, help="text file to ask about (default: the standard library's topics)")
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

    from gistkit.evaluate.report import format_table
    from gistkit.info import machine
    from gistkit.studies import in_place
    from gistkit.studies import in_place_report as report
    from gistkit.studies.in_place_runs import run_study
    from gistkit.train.data import load_corpus
    from gistkit.viz import in_place as _  # noqa: F401

    where, out = device(arguments.device), arguments.out
    recipe = in_place.PRESETS[arguments.preset]
    if arguments.steps:
        recipe = replace(recipe, steps=arguments.steps)
    corpus = load_corpus(arguments.text)
    arms = in_place.arms(arguments.methods, [int(ratio) for ratio in arguments.ratios])
    print(
        f"Answering from contexts of {recipe.min_length} to {recipe.max_length} tokens, {len(arms)} arms of "
        f"{recipe.steps} steps of {recipe.batch}; text {corpus.name}, {corpus.digest}"
    )
    runs = []
    for found in run_study(
        recipe, arms, list(range(arguments.seeds)), corpus, out, device=where, resume=arguments.resume
    ):
        runs.append(found)
        report.write_json(out / "results.json", runs, recipe, corpus, machine())
    for split, what in (("held_out", "Held-out questions"), ("test", "Questions that no choice was made on")):
        print(f"\n{what}:\n{format_table(report.table_rows(runs, split))}")
    print("\nHeld-out questions, as they were answered:")
    print(report.format_examples(runs))
    pictures = report.draw(out, runs)
    print("\nWritten: " + ", ".join(str(path) for path in [out / "results.json", *pictures]))
    return 0
