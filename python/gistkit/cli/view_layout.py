"""`gistkit view layout`: a page of a method's attention mask and position IDs."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gistkit.cli.view_page import add_out, fits_page, write_page
from gistkit.options.arguments import add_command, number
from gistkit.options.outputs import check_file

if TYPE_CHECKING:
    from gistkit.layouts import Layout

PURPOSE = "write a page that shows a layout's attention mask and position IDs"
EXAMPLE = "example: gistkit view layout gistpool --context 512 --ratio 8 --text 64 -o view.html"
# Default number of text tokens: a layout is about what they see.
TEXT = 16


def _or_all(text: str) -> int | None:
    return None if text == "all" else fits_page(text)


def _of_images(text: str) -> int | list[int]:
    return [fits_page(part) for part in text.split(",")] if "," in text else fits_page(text)


# Of a builder's annotations; an argument with another one has no option.
KINDS: dict[str, Any] = {
    "int": fits_page,
    "int | None": _or_all,
    "int | Sequence[int]": _of_images,
    "float | None": number(1),
    "str": str,
    "bool": bool,
}


def dodo(context: int, ratio: int, tau: int, *, segment: int = 1, bos: bool = False) -> Layout:
    """Dodo with evenly spaced nuggets.

    Args:
        context: number of tokens.
        ratio: tokens per nugget.
        tau: most recent tokens that are seen uncompressed.
        segment: tokens that share the start of the uncompressed part.
        bos: the first token is BOS, visible to all.
    """
    import numpy as np

    from gistkit import layouts

    if ratio < 1:
        raise ValueError(f"dodo: expected ratio >= 1, got {ratio}")
    return layouts.dodo((np.arange(context) + 1) % ratio == 0, tau, segment=segment, bos=bos)


def builder(name: str) -> Callable[..., Layout]:
    from gistkit.layouts import BUILDERS

    return dodo if name == "dodo" else BUILDERS[name]


def example(name: str) -> str:
    from gistkit.layouts.builders import EXAMPLES

    shown = dict(reversed(EXAMPLES.values()))
    arguments = {"context": 256, "ratio": 8, "tau": 64} if name == "dodo" else shown[name]
    return " ".join(f"--{argument.replace('_', '-')} {value}" for argument, value in arguments.items())


def add(kinds: Any) -> None:
    """Adds the command, whose methods are added at first use, as their builders import torch."""
    layout = kinds.add_parser("layout", help=PURPOSE, description=PURPOSE[0].upper() + PURPOSE[1:], epilog=EXAMPLE)
    layout.fill = _add_methods


def _add_methods(layout: argparse.ArgumentParser) -> None:
    """A command for each builder: its options are the builder's arguments, with the words of its docstring."""
    from gistkit.layouts import BUILDERS

    methods = layout.add_subparsers(required=True, metavar="METHOD")
    for name in BUILDERS:
        build, command = builder(name), name.replace("_", "-")
        doc = str(inspect.getdoc(build)).replace("%", "%%")
        purpose, words = doc.partition("\n")[0], dict[str, str]()
        for names, text in re.findall(r"^    ([\w, ]+): (.+(?:\n {8}.+)*)", doc, re.MULTILINE):
            words |= dict.fromkeys(names.split(", "), " ".join(text.split()))
        parser = add_command(methods, command, _run, purpose, f"example: gistkit view layout {command} {example(name)}")
        parser.set_defaults(builder=name)
        for argument in inspect.signature(build).parameters.values():
            if (kind := KINDS.get(argument.annotation)) is None:
                continue
            how: dict[str, Any] = {"type": kind, "metavar": "NAME" if kind is str else "N"}
            how = {"action": argparse.BooleanOptionalAction} if kind is bool else how
            said = words.get(argument.name)
            if kind is _or_all and said is not None:
                said = re.sub(r"\bNone\b", "all", said)
            needed = argument.default is inspect.Parameter.empty
            parser.add_argument(
                "--" + argument.name.replace("_", "-"), dest=argument.name, required=needed,
                help=said, **how,
                default=TEXT if argument.name == "text" and not needed else argparse.SUPPRESS,
            )  # fmt: skip
        add_out(parser)


def _run(arguments: argparse.Namespace) -> int:
    check_file("-o", arguments.out)

    from gistkit.viz.page import layout_page

    build = builder(arguments.builder)
    taken = inspect.signature(build).parameters
    try:
        layout = build(**{name: value for name, value in vars(arguments).items() if name in taken})
    except TypeError as error:
        raise ValueError(str(error)) from error
    write_page(layout_page(layout), arguments.out)
    return 0
