"""`gistkit demo`: position layouts compared on a small autoencoder, or on a real model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, device
from gistkit.cli.study import EPL, add_epl_arguments, run_epl

EXAMPLES = """\
example: gistkit demo --seeds 3 --out runs/three
example: gistkit demo --model smollm2 --layouts dpl,epl"""
SMOLLM2_OUT = Path("runs/smollm2")
ONLY_TINY = ("steps",)


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "demo", _run, EPL, EXAMPLES)
    parser.add_argument(
        "--model", choices=("tiny", "smollm2"), default="tiny",
        help="tiny: a small model from scratch; smollm2: LoRA on SmolLM2-135M, its results in runs/smollm2 "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--preset", help="size of the run with --model smollm2: short, long or paper (default: short)")
    add_epl_arguments(parser)
    parser.set_defaults(tiny={name: parser.get_default(name) for name in ONLY_TINY})


def _run(arguments: argparse.Namespace) -> int:
    if arguments.model == "smollm2":
        return _run_smollm2(arguments)
    if arguments.preset is not None:
        raise ValueError(f"--preset: expected it with --model smollm2 alone, got {arguments.preset!r}")
    return run_epl(arguments)


def _run_smollm2(arguments: argparse.Namespace) -> int:
    for name, default in arguments.tiny.items():
        if getattr(arguments, name) != default:
            raise ValueError(f"--{name}: expected it with --model tiny alone, got {getattr(arguments, name)}")
    where = device(arguments.device)

    from gistkit.studies import smollm2

    smollm2.run_demo(
        out=arguments.out or SMOLLM2_OUT,
        preset=arguments.preset or "short",
        layouts=arguments.layouts,
        text=arguments.text,
        device=where,
        seeds=arguments.seeds,
        resume=arguments.resume,
    )
    return 0
