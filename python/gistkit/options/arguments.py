"""Kinds of arguments that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

LAYOUTS = ("dpl", "upl", "cpl", "epl")

Value = TypeVar("Value")


def add_command(commands: Any, name: str, run: Any, purpose: str, examples: str) -> argparse.ArgumentParser:
    """A command with its help: one line of purpose, and at least one example at the end."""
    parser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:],
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def whole(low: int = 0, high: int | None = None) -> Callable[[str], int]:
    """A kind of argument: a whole number of at least `low`, or of at most `high`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            limits = f"at least {low}" if high is None else f"at most {high}"
            raise argparse.ArgumentTypeError(f"expected a whole number of {limits}, got {text!r}")
        return int(text)

    return convert


positive = whole(1)


def number(low: float, high: float = float("inf")) -> Callable[[str], float]:
    """A kind of argument: a number from `low` to `high`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or value == float("inf"):
            limits = f"of at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text!r}")
        return value

    return convert


def names(*choices: str, empty: bool = False) -> Callable[[str], list[str]]:
    """A kind of argument: comma-separated names out of `choices`, each once; none only where `empty`."""

    def convert(text: str) -> list[str]:
        values = [name.strip().lower() for name in text.split(",") if name.strip()]
        if not (values or empty) or not set(values) <= set(choices) or len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(choices)}, each once, got {text!r}")
        return values

    return convert


def several(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A kind of argument: comma-separated values of the kind `kind`, at least one and each once."""

    def convert(text: str) -> list[Value]:
        values = [kind(part.strip()) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected each value once, got {text!r}")
        return values

    return convert


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device; `device` checks it."""
    parser.add_argument("--device", default="cpu", help="torch device, cpu or cuda (default: %(default)s)")


def device(text: str) -> str:
    """The name of an available device for which the ops have kernels.

    Raises:
        ValueError: otherwise, with the reason.
    """
    import torch

    try:
        parsed = torch.device(text)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {text!r}")
    if parsed.type == "cuda":
        from gistkit.info import cuda_library

        if not torch.cuda.is_available():
            raise ValueError(f"--device: expected a device that is here, got {text!r}, and torch sees no CUDA device")
        if (parsed.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device: expected one of {torch.cuda.device_count()} CUDA devices, got {text!r}")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("gistkit::attention", "CUDA"):
            raise ValueError(f"--device: expected cpu, got {text!r}; the CUDA library is {cuda_library()}")
    return text
