"""`gistkit view layout`: a page of a method's attention mask and position IDs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gistkit.cli.view_page import add_out, fits_page, write_page
from gistkit.options.arguments import add_command, number
from gistkit.options.outputs import check_file

if TYPE_CHECKING:
    from gistkit.layouts import Layout

PURPOSE = "write a page that shows a layout's attention mask and position IDs"
EXAMPLE = "example: gistkit view layout gistpool --context 512 --ratio 8 --text 64 -o view.html"


def _ratio(text: str) -> float:
    return fits_page(text) if text.isdecimal() else number(1)(text)


def _windows(text: str) -> int | None:
    return None if text == "all" else fits_page(text)


def _of_images(text: str) -> int | list[int]:
    return [fits_page(part) for part in text.split(",")] if "," in text else fits_page(text)


# Default number of text tokens: a layout is about what they see.
TEXT = 16
SCHEMES = "dpl, upl, cpl or epl"
# {argument of a builder: (its kind, help)}
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "length": (fits_page, "number of tokens"),
    "context": (fits_page, "number of context tokens"),
    "vision": (_of_images, "vision tokens per image, or of each image: 48,16"),
    "chunk": (fits_page, "context tokens per chunk"),
    "memory": (_of_images, "memory tokens, per chunk or image if there are any; of each image: 4,2"),
    "ratio": (_ratio, "context tokens per memory token"),
    "text": (fits_page, "number of text tokens after the context"),
    "question": (fits_page, "question tokens before the text"),
    "before": (fits_page, "text tokens before the first image"),
    "between": (_of_images, "text tokens between images, or after each image but the last: 8,4"),
    "gap": (fits_page, "prompt tokens between an image and its memory tokens"),
    "images": (fits_page, "number of images"),
    "windows": (_windows, "windows that a memory token sees, or all"),
    "tau": (fits_page, "most recent tokens that are seen uncompressed"),
    "segment": (fits_page, "tokens that share the start of the uncompressed part"),
    "positions": (str, "position IDs: " + SCHEMES),
    "task": (str, "ae, lm or qa"),
    "carrier": (str, "what the memory is: embedding or kv"),
    "bos": (bool, "the first token is BOS, visible to all"),
    "separate_positions": (bool, "memory tokens have their own position counter"),
    "memory_sees_memory": (bool, "memory tokens see earlier ones"),
    "memory_sees_itself": (bool, "memory tokens see themselves"),
    "memory_sees_bos": (bool, "memory tokens see BOS"),
    "context_sees_memory": (bool, "context tokens see earlier memory tokens"),
    "text_sees_before": (bool, "text after the images sees the text before them"),
    "bidirectional": (bool, "vision tokens see their whole image"),
}
# {builder of gistkit.layouts: (title, required arguments, optional arguments, an example)}
BUILDERS = {
    "causal": ("a plain causal language model", "length", "", "--length 64"),
    "full_context": ("text that sees all of the context", "context", "text", "--context 64 --text 16"),
    "no_context": ("text without its context", "text", "", "--text 64"),
    "gist": ("Gist", "context", "ratio text memory separate_positions", "--context 64 --ratio 8 --text 16"),
    "avgpool": ("AvgPool", "context ratio", "text", "--context 64 --ratio 8 --text 16"),
    "gistpool": (
        "GistPool",
        "context ratio",
        "text windows memory_sees_memory memory_sees_itself memory_sees_bos context_sees_memory separate_positions",
        "--context 512 --ratio 8 --text 64 --windows 2",
    ),
    "sac": ("the encoder of SAC", "context chunk ratio", "", "--context 96 --chunk 32 --ratio 8"),
    "icae_encoder": (
        "the encoder of ICAE and 500xCompressor", "context chunk memory", "positions",
        "--context 96 --chunk 32 --memory 4 --positions epl",
    ),
    "decoder": (
        "the decoder of ICAE and 500xCompressor", "context chunk memory", "task carrier positions text question",
        "--context 96 --chunk 32 --memory 4 --task qa --question 8 --text 8",
    ),
    "voco": (
        "VoCo", "vision memory", "text before between gap images positions text_sees_before bidirectional",
        "--vision 48,16 --memory 4 --between 8 --text 8",
    ),
    "dodo": (
        "Dodo with evenly spaced nuggets", "context ratio tau", "segment bos",
        "--context 256 --ratio 8 --tau 64",
    ),
}  # fmt: skip


def add(kinds: Any) -> None:
    """Adds the command."""
    layout = kinds.add_parser("layout", help=PURPOSE, description=PURPOSE[0].upper() + PURPOSE[1:], epilog=EXAMPLE)
    methods = layout.add_subparsers(required=True, metavar="METHOD")
    for name, (purpose, needed, optional, example) in BUILDERS.items():
        command = name.replace("_", "-")
        parser = add_command(methods, command, _run, purpose, f"example: gistkit view layout {command} {example}")
        parser.set_defaults(builder=name)
        for argument in [*needed.split(), *optional.split()]:
            kind, words = ARGUMENTS[argument]
            how: dict[str, Any] = {"type": kind, "metavar": "NAME" if kind is str else "N"}
            how = {"action": argparse.BooleanOptionalAction} if kind is bool else how
            parser.add_argument(
                "--" + argument.replace("_", "-"), dest=argument, required=argument in needed.split(), help=words,
                default=TEXT if argument == "text" and argument in optional.split() else argparse.SUPPRESS, **how,
            )  # fmt: skip
        add_out(parser)


def _run(arguments: argparse.Namespace) -> int:
    check_file("-o", arguments.out)

    from gistkit.viz.page import layout_page

    _, needed, optional, _ = BUILDERS[arguments.builder]
    builder_options = {
        name: value for name, value in vars(arguments).items() if name in [*needed.split(), *optional.split()]
    }
    try:
        layout = _dodo(**builder_options) if arguments.builder == "dodo" else _build(arguments.builder, builder_options)
    except TypeError as error:
        raise ValueError(str(error)) from error
    write_page(layout_page(layout), arguments.out)
    return 0


def _build(name: str, options: dict[str, Any]) -> Layout:
    from gistkit import layouts

    return getattr(layouts, name)(**options)


def _dodo(context: int, ratio: int, tau: int, **options: Any) -> Layout:
    import numpy as np

    from gistkit.layouts import dodo

    if not isinstance(ratio, int) or ratio < 1:
        raise ValueError(f"dodo: expected ratio to be a whole number of at least 1, got {ratio}")
    return dodo((np.arange(context) + 1) % ratio == 0, tau, **options)
