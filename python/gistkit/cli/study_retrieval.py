"""`gistkit study retrieval`: facts looked up in longer contexts than in training, by position encoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, device
from gistkit.cli.study_length import ENCODINGS, add_arguments

PURPOSE = "compare SeqPE with other position encodings at looking up facts in contexts longer than those in training"
EXAMPLES = """example: gistkit study retrieval --preset quick --encodings nope,rope-1e4,seqpe-bias
         gistkit study retrieval --seeds 3 --resume"""
OUT = Path("runs/retrieval")


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "retrieval", run, PURPOSE, EXAMPLES)
    add_arguments(
        parser,
        ENCODINGS,
        "quick: seconds a run; short: trained on 64 tokens and tested on 512, a minute or two a run on a CPU; paper: "
        "GPT-2's size, trained on 1024 tokens and tested on 8192, on a GPU (default: %(default)s)",
        OUT,
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints the tables and leaves results and a picture in --out."""
    # All that the end needs is loaded before the training starts.
    from dataclasses import replace

    from gistkit.evaluate.report import format_table
    from gistkit.info import machine
    from gistkit.studies import extrapolation, retrieval
    from gistkit.studies import extrapolation_report as report
    from gistkit.viz import extrapolation as _  # noqa: F401

    where, out = device(arguments.device), arguments.out
    recipe = retrieval.PRESETS[arguments.preset]
    if arguments.steps:
        recipe = replace(recipe, steps=arguments.steps)
    print(
        f"{recipe.facts} facts, a key and its value each: trained on {recipe.length} tokens, tested at up to "
        f"{recipe.lengths[-1]}; by chance one answer in {recipe.values} is right; "
        f"{len(arguments.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}"
    )
    runs = []
    for found in retrieval.run_study(
        recipe, extrapolation.arms(arguments.encodings), list(range(arguments.seeds)), out, device=where,
        resume=arguments.resume,
    ):  # fmt: skip
        runs.append(found)
        report.write_retrieval(out / "results.json", runs, recipe, machine())
    for figure, what in (("exact", "Right answers"), ("perplexity", "Perplexity of the answers")):
        print(f"\n{what}, sequences that no choice was made on:\n{format_table(report.retrieval_rows(runs, figure))}")
    print(f"\n{format_table(report.paper_retrieval_rows())}")
    pictures = report.draw_retrieval(out, runs)
    print("\nWritten: " + ", ".join(str(path) for path in [out / "results.json", *pictures]))
    return 0
