"""`gistkit demo`: position layouts compared on a small autoencoder, or on a real model."""

from __future__ import annotations

import argparse
from typing import Any

from gistkit_lab.cli import study

EXAMPLES = """\
example: gistkit demo --seeds 3 --out runs/three
example: gistkit demo --model smollm2 --layouts dpl,epl"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = study.add_late(commands, "demo", "epl", EXAMPLES, _fill)
    parser.set_defaults(run=_run)


def _fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=("tiny", "smollm2"), default="tiny",
        help="tiny: a small model from scratch; smollm2: LoRA on SmolLM2-135M, its results in runs/smollm2 "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--preset", help="size of the run with --model smollm2: short, long or paper (default: short)")
    study.add_options(parser, "epl")
    parser.set_defaults(tiny_steps=parser.get_default("steps"))


def _run(options: argparse.Namespace) -> int:
    if options.model == "tiny":
        if options.preset is not None:
            raise ValueError(f"--preset: expected it with --model smollm2 alone, got {options.preset!r}")
        return study.run(options)
    if options.steps != options.tiny_steps:
        raise ValueError(f"--steps: expected it with --model tiny alone, got {options.steps}")
    options.study, options.preset = "smollm2", options.preset or "short"
    # What the preset says.
    options.method = options.match_embeddings = options.dtype = options.learning_rate = None
    return study.run(options)
