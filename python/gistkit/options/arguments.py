"""Argument types and options shared by several commands."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn, TypeVar

from gistkit.common.messages import one_line
from gistkit.options.messages import MOST

LAYOUTS = ("dpl", "upl", "cpl", "epl")
# The largest int32: torch, NumPy and files accept numbers up to this size.
LARGEST = 2**31 - 1

Value = TypeVar("Value")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the lines of examples, and breaks no name at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": Help, **kwargs})

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            near = get_close_matches(choice[1], re.findall(r"'([^']*)'", choice[2]), n=1, cutoff=0.7)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {one_line(message, MOST)}; {self.prog} --help lists the options\n")


class LateParser(Parser):
    """A parser whose arguments are added at first use, because importing what they need takes seconds."""

    fill: Any = None

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self._fill_once()
        return super().parse_known_args(*args, **kwargs)

    def format_help(self) -> str:
        self._fill_once()
        return super().format_help()

    def _fill_once(self) -> None:
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)


def add_command(commands: Any, name: str, run: Any, purpose: str, examples: str) -> argparse.ArgumentParser:
    """A command with its help: one line of purpose, and at least one example at the end."""
    parser = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:], epilog=examples)
    # Error messages name the option as typed.
    parser.set_defaults(run=run, actions=parser._actions, prog=parser.prog)
    return parser


def whole(low: int = 0, high: int = LARGEST) -> Callable[[str], int]:
    """Argument type: an integer from `low` to `high`."""

    def convert(text: str) -> int:
        # Python refuses to read thousands of digits.
        value = int(text) if text.isdecimal() and len(text) <= 20 else -1
        if not low <= value <= high:
            small = not text.isdecimal() or 0 <= value < low
            limits = f"of at least {low}" if small else f"of at most {high}"
            limits = limits if high == LARGEST else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {text!r:.80}")
        return value

    return convert


positive = whole(1)


def path(text: str) -> Path:
    """Argument type: a path, which need not exist."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r:.80}")
    return Path(text)


def existing(text: str) -> Path:
    """Argument type: the path of a file or a folder to read, which `check_values` looks for."""
    return path(text)


def typed(text: str) -> str:
    """Argument type: the same as it is typed, or - for standard input."""
    return text


def _check_existing(name: str, value: str | Path) -> None:
    text = str(value)
    # Standard input, a name of the hub, and no name at all, which the command refuses.
    if text.startswith(("-", "hf:")) or not text.strip() or os.path.exists(text):
        return
    folder, last = os.path.split(text)
    hint = ""
    # There may be no such folder, or no right to list it.
    with suppress(OSError):
        for near in get_close_matches(last, os.listdir(folder or "."), n=1, cutoff=0.7):
            hint = f"; did you mean {os.path.join(folder, near)}?"
    raise FileNotFoundError(f"{name}: {text:.200}: no such file or folder{hint}")


# {argument type: what refuses a value, given the argument's name}; those that import much come last.
CHECKS: dict[Any, Callable[[str, Any], None]] = {existing: _check_existing, typed: _check_existing}


def check_values(options: argparse.Namespace) -> None:
    """Refuses values that the types of `CHECKS` do not fit, before the command imports what takes seconds."""
    for kind, check in CHECKS.items():
        for action in [action for action in getattr(options, "actions", ()) if action.type is kind]:
            name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest.upper())
            given = getattr(options, action.dest)
            for value in given if isinstance(given, list) else [given]:
                if value is not None:
                    check(name, value)


def number(low: float, high: float = float("inf")) -> Callable[[str], float]:
    """Argument type: a float from `low` to `high`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or value == float("inf"):
            limits = f"of at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text!r:.80}")
        return value

    return convert


def names(*choices: str, empty: bool = False) -> Callable[[str], list[str]]:
    """Argument type: comma-separated names from `choices`, each at most once; `empty` allows none."""

    def convert(text: str) -> list[str]:
        values = [name.strip().lower() for name in text.split(",") if name.strip()]
        if not (values or empty) or not set(values) <= set(choices) or len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(choices)}, each once, got {text!r:.80}")
        return values

    return convert


def add_questions(group: Any, purpose: str, split: str, more: str = "") -> None:
    """Adds --questions and --split, whose default is `split`; `purpose` and `more` stand in their help."""
    group.add_argument(
        "--questions", type=existing, metavar="FILE", nargs="+",
        help=f"files or folders of questions, {purpose}. JSON lines of context, question and answers, or MRQA, SQuAD, "
        "DROP, RACE, NarrativeQA, FairytaleQA, Alpaca, PwC and CNN/DailyMail as published; plain, gzip or zstd; or "
        "hf:owner/name from the Hugging Face hub",
    )  # fmt: skip
    group.add_argument(
        "--split", choices=("train", "validation", "test"), default=split,
        help=f"split to use if --questions has several{more} (default: %(default)s)",
    )  # fmt: skip


def several(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Argument type: comma-separated values of the type `kind`, at least one, each once."""

    def convert(text: str) -> list[Value]:
        values = [kind(part.strip()) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected each value once, got {text!r:.80}")
        return values

    return convert


def add_declared(group: Any, kind: Any, defaults: bool) -> None:
    """An option for each field that a dataclass has declared; one that is not given is None.

    `defaults`: whether its defaults are the command's.
    """
    for each in (each for each in fields(kind) if each.metadata):
        rules: Any = each.metadata
        options: dict[str, Any] = {"metavar": "N"}
        if isinstance(each.default, bool):
            options = {"action": "store_true", "default": None}
        elif rules["among"]:
            options = {"choices": rules["among"]}
        elif str(each.type).startswith("int"):
            options["type"] = whole(rules["least"])
        else:
            options["type"] = number(rules["above"] or 0, rules["most"])
        default = f" (default: {each.default})" if defaults and each.default not in (None, False) else ""
        group.add_argument(f"--{each.name.replace('_', '-')}", help=rules["purpose"] + default, **options)


def names_of(kind: Any) -> list[str]:
    """The fields that `add_declared` makes options of."""
    return [each.name for each in fields(kind) if each.metadata]


def add_device(parser: Any) -> None:
    """Adds --device; `device` checks it and has its default."""
    parser.add_argument("--device", help="cpu or cuda (default: cuda if torch and gistkit support it, else cpu)")


def device(text: str | None) -> str:
    """The name of a device for which the ops have kernels; None: "cuda" if available, else "cpu"."""
    import torch

    # Loads the libraries whose kernels are looked up.
    from gistkit.ops._private import has_cuda_kernel

    has_kernels = has_cuda_kernel("gistkit::attention") is not False
    if text is None:
        return "cuda" if has_kernels and torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(text)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {text!r}")
    if parsed.type == "cuda":
        from gistkit.info import cuda_library

        if not torch.cuda.is_available():
            raise ValueError(f"--device: expected cpu, got {text!r}: torch finds no CUDA device")
        if (parsed.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device: expected one of {torch.cuda.device_count()} CUDA devices, got {text!r}")
        if not has_kernels:
            raise ValueError(f"--device: expected cpu, got {text!r}; the CUDA library is {cuda_library()}")
    return "cpu" if parsed.type == "cpu" else text
