"""`gistkit nuggets`: which tokens of a text a Dodo compressor keeps."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.files import write_picture, write_text
from gistkit.options.arguments import add_command, device, path, typed
from gistkit.options.models import add_model, load_compressor, load_model, trained_folder
from gistkit.options.outputs import check_file
from gistkit.options.texts import STDIN, find_sources

if TYPE_CHECKING:
    from gistkit.compress import Dodo

PURPOSE = "show which tokens of a text a Dodo compressor keeps, and how it scores the others"
EXAMPLES = """\
example: gistkit nuggets report.txt -o report.html --model smollm2 --compressor runs/dodo/compressor
example: gistkit nuggets - -o nuggets.png --model ./llama --compressor runs/dodo/compressor < report.txt"""
SUFFIXES = (".html", ".png")


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "nuggets", _run, PURPOSE, EXAMPLES)
    parser.add_argument("text", type=typed, metavar="TEXT", help="text file, or - for standard input")
    parser.add_argument(
        "-o", "--out", type=path, help="page or picture to write, .html or .png (default: X.html beside X.txt)"
    )
    add_model(parser)
    parser.add_argument(
        "--compressor", type=trained_folder, metavar="FOLDER", required=True, help="folder of a trained Dodo compressor"
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.text == STDIN and arguments.out is None:
        raise ValueError("-o: expected a file name for the picture of standard input; give one with -o FILE")
    out = arguments.out or Path(arguments.text).with_suffix(".html")
    if out.suffix not in SUFFIXES:
        raise ValueError(f"-o: expected a file that ends in {' or '.join(SUFFIXES)}, got {out}")
    check_file("-o", out)
    (source,) = find_sources([arguments.text], "", out)
    text = source.read()
    device_name = device(arguments.device)

    from gistkit.common.text_ids import text_ids
    from gistkit.compress import Dodo
    from gistkit.evaluate import token_texts
    from gistkit.evaluate.report import format_table
    from gistkit_lab.evaluate.token_types import token_types

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    compressor = load_compressor(arguments.compressor, model)
    if not isinstance(compressor, Dodo):
        raise ValueError(
            f"--compressor: expected a dodo compressor, which keeps tokens of the text, got {compressor.method}"
        )
    ids, scores, selected = _scored(compressor, text_ids(text, tokenizer))
    tokens, count = token_texts(tokenizer, ids), sum(selected)
    title = f"{source.name}: {count} of {len(tokens)} tokens"
    if out.suffix == ".html":
        from gistkit_lab.viz.text import text_page

        write_text(out, text_page(tokens, scores, selected, title=title))
    else:
        from gistkit_lab.viz.text import draw_text

        write_picture(out, draw_text(tokens, scores, selected, title=title), dpi=150)
    print(f"{title} kept, {len(tokens) / count:.1f}x\n")
    table = [["token", "share of nuggets", "share of text"]]
    table += [
        [repr(token), f"{nugget_share:.3f}", f"{text_share:.3f}"]
        for token, nugget_share, text_share in token_types(tokens, selected)[:10]
    ]
    print(format_table([row for row in table if row[1] != "0.000"]))
    print(f"\nWritten: {out}")
    return 0


def _scored(compressor: Dodo, row: list[int]) -> tuple[list[int], list[float], list[bool]]:
    """The tokens of a text without BOS, their scores, and which are kept, in the parts that `encode` reads."""
    ids, scores, selected = list[int](), list[float](), list[bool]()
    for start, end in pairwise([0, *compressor.part_ends(row)]):
        first = [compressor.bos_token] if start else []
        part = compressor.with_bos(compressor.contexts([[*first, *row[start:end]]]))
        own = compressor.whole_scores(part)
        kept = set(compressor.nuggets(part, own).index[0].tolist())
        ids += part.ids[0, 1:].tolist()
        scores += own[0, 1:].tolist()
        selected += [column in kept for column in range(1, part.ids.shape[1])]
    return ids, scores, selected
