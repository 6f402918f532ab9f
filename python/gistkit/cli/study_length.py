"""`gistkit study length`: language models tested at longer texts than they were trained on, by position encoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, add_device, device, names, positive

PURPOSE = "compare SeqPE with other position encodings at texts longer than those in training"
EXAMPLES = """example: gistkit study length --preset quick --encodings rope-1e4,alibi,seqpe-bias
         gistkit study length --seeds 3 --resume
         gistkit study length --preset paper --device cuda"""
ENCODINGS = (
    "nope", "sinusoidal", "learned", "rope-1e4", "rope-1e6", "rope-1e8", "alibi", "seqpe-sum", "seqpe-mul", "seqpe-bias"
)  # fmt: skip
ABLATIONS = ("seqpe-bias-no-delta", "seqpe-bias-no-ood")
PRESETS = ("quick", "short", "paper")
OUT = Path("runs/length")


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "length", run, PURPOSE, EXAMPLES)
    add_arguments(
        parser,
        (*ENCODINGS, *ABLATIONS),
        "quick: seconds a run; short: trained on 128 bytes and tested on 4096, minutes a run on a CPU; paper: GPT-2 on "
        "WikiText-103, trained on 512 tokens and tested on 16384, on a GPU (default: %(default)s)",
        OUT,
    )
    parser.add_argument("--text", type=Path, help="text file or folder (default: the standard library's topics)")
    parser.add_argument("--dataset", help="Hugging Face dataset with a column text (default: of paper, WikiText-103)")
    parser.add_argument("--tokenizer", help="folder or hub name (default: bytes; of paper, GPT-2's)")


def add_arguments(parser: argparse.ArgumentParser, encodings: tuple[str, ...], presets: str, out: Path) -> None:
    """What the studies `length` and `retrieval` both take."""
    parser.add_argument("--preset", choices=PRESETS, default="short", help=presets)
    parser.add_argument(
        "--encodings",
        type=names(*encodings, *(one for one in ABLATIONS if one not in encodings)),
        default=list(encodings),
        help=f"comma-separated (default: {','.join(encodings)})",
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--steps", type=positive, help="training steps a run (default: the preset's)")
    add_device(parser)
    parser.add_argument("--out", type=Path, default=out, help="folder for results (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run in --out stopped")
    parser.set_defaults(if_interrupted="; --resume goes on from the last evaluation")


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints the tables and leaves results and a picture in --out."""
    # All that the end needs is loaded before the training starts.
    from dataclasses import replace

    from gistkit.evaluate.report import format_table
    from gistkit.info import machine
    from gistkit.studies import extrapolation, length
    from gistkit.studies import extrapolation_report as report
    from gistkit.train.data import load_corpus
    from gistkit.viz import extrapolation as _  # noqa: F401

    where, out = device(arguments.device), arguments.out
    recipe = length.PRESETS[arguments.preset]
    if arguments.steps:
        recipe = replace(recipe, steps=arguments.steps)
    dataset, tokenizer = arguments.dataset, arguments.tokenizer
    if arguments.preset == "paper" and arguments.text is None and dataset is None:
        dataset = length.PAPER_DATASET
    if arguments.preset == "paper" and tokenizer is None:
        tokenizer = length.PAPER_TOKENIZER
    corpus = load_corpus(arguments.text, dataset=dataset, tokenizer=_tokenizer(tokenizer), progress=dataset is not None)
    print(
        f"Language models of {recipe.length} {corpus.unit}, tested at up to {recipe.lengths[-1]}: "
        f"{len(arguments.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}; text {corpus.name}, "
        f"{corpus.digest}"
    )
    runs = []
    for found in length.run_study(
        recipe, extrapolation.arms(arguments.encodings), list(range(arguments.seeds)), corpus, out, device=where,
        resume=arguments.resume,
    ):  # fmt: skip
        runs.append(found)
        report.write_length(out / "results.json", runs, recipe, corpus, machine())
    for split, what in (("held_out", "held-out text"), ("test", "text that no choice was made on")):
        print(f"\nPerplexity of chunks without overlap, {what}:\n{format_table(report.length_rows(runs, split))}")
    print(f"\n{format_table(report.paper_length_rows())}")
    pictures = report.draw_length(out, runs)
    print("\nWritten: " + ", ".join(str(path) for path in [out / "results.json", *pictures]))
    return 0


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)
