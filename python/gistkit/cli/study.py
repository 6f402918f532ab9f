"""`gistkit study`: the papers' experiments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli import (
    study_greedy,
    study_in_place,
    study_length,
    study_nuggets,
    study_pooling,
    study_resolution,
    study_retrieval,
)
from gistkit.cli.arguments import LAYOUTS, add_command, add_device, device, names, positive

EPL = "compare position layouts (DPL, UPL, EPL) on a small autoencoder"
ABLATION = "train the same autoencoder with and without compression loss, autoencoding loss and spread position ids"
STUDIED = ("dpl", "upl", "epl")
EPL_OUT = Path("runs/epl")
RESUME = "; --resume goes on from the last evaluation"


def add(commands: Any) -> None:
    """Adds the command and its studies."""
    study = commands.add_parser(
        "study", help="run a paper's experiment", epilog="example: gistkit study epl --layouts dpl,epl --seeds 3"
    )
    studies = study.add_subparsers(required=True, metavar="STUDY")
    ablation = add_command(
        studies, "compression-loss", run_compression_loss, ABLATION, "example: gistkit study compression-loss --seeds 3"
    )
    _add_common(ablation, Path("runs/compression-loss"))
    example = "example: gistkit study epl --text book.txt --layouts dpl,epl --resume"
    add_epl_arguments(add_command(studies, "epl", run_epl, EPL, example))
    study_in_place.add(studies)
    study_nuggets.add(studies)
    study_pooling.add(studies)
    study_greedy.add(studies)
    study_length.add(studies)
    study_retrieval.add(studies)
    study_resolution.add(studies)


def add_epl_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study `epl`."""
    parser.add_argument(
        "--layouts", type=names(*LAYOUTS), default=list(STUDIED), help=f"comma-separated (default: {','.join(STUDIED)})"
    )
    _add_common(parser, EPL_OUT)


def _add_common(parser: argparse.ArgumentParser, out: Path) -> None:
    parser.add_argument("--text", type=Path, help="text file to train on (default: the standard library's topics)")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=450, help="training steps a run (default: %(default)s)")
    add_device(parser)
    parser.add_argument("--out", type=Path, help=f"folder for results (default: {out})")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run in --out stopped")
    parser.set_defaults(if_interrupted=RESUME)


def run_epl(arguments: argparse.Namespace) -> int:
    """Trains, prints the table and leaves results and pictures in --out."""
    # All that the end needs is loaded before the training starts.
    from gistkit.evaluate.report import format_table
    from gistkit.studies import epl, report
    from gistkit.studies import runs as training
    from gistkit.train.data import load_corpus
    from gistkit.viz import studies as _  # noqa: F401

    where, out = device(arguments.device), arguments.out or EPL_OUT
    recipe = epl.Recipe(steps=arguments.steps)
    corpus = load_corpus(arguments.text)
    print(
        f"Reconstructing {recipe.chunk} bytes from {recipe.chunk // recipe.ratio} memory tokens; text {corpus.name} "
        f"({corpus.train.numel()} + {corpus.held_out.numel()} held-out bytes, {corpus.digest})"
    )
    seeds = list(range(arguments.seeds))
    runs = []
    for run in training.run_study(
        recipe, epl.build_compressor, arguments.layouts, seeds, corpus, out, device=where, resume=arguments.resume
    ):
        runs.append(run)
        report.write_json(out / "results.json", runs, recipe, corpus)
    print()
    print(format_table(report.table_rows(runs)))
    print("\nOne held-out passage, reconstructed greedily:")
    print(report.format_passages(runs))
    print()
    print(report.format_tracking(runs, recipe))
    print(f"\n{report.LIMITS}")
    pictures = report.draw(out, runs, recipe)
    print("\nWritten: " + ", ".join(str(path) for path in [out / "results.json", *pictures]))
    return 0


def run_compression_loss(arguments: argparse.Namespace) -> int:
    """Trains every setting, prints the table and leaves results in --out."""
    from gistkit.evaluate.report import format_table
    from gistkit.studies import compression_loss as study
    from gistkit.studies import report
    from gistkit.studies import runs as training
    from gistkit.train.data import load_corpus

    where, out = device(arguments.device), arguments.out or Path("runs/compression-loss")
    recipe = study.Recipe(steps=arguments.steps)
    corpus = load_corpus(arguments.text)
    runs, seeds = [], list(range(arguments.seeds))
    for run in training.run_study(
        recipe, study.build_compressor, list(study.SETTINGS), seeds, corpus, out, device=where, resume=arguments.resume
    ):
        runs.append(run)
        report.write_json(out / "results.json", runs, recipe, corpus, study="compression-loss")
    print("\n" + format_table(study.table_rows(runs)))
    print("\nHeld-out losses in nats a byte; in brackets a loss that was not trained on.")
    print(f"Written: {out / 'results.json'}")
    return 0
