"""`gistkit nuggets`: which tokens of a text a Dodo compressor keeps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.common.files import write_picture, write_text
from gistkit.options.arguments import add_command, device, path, typed
from gistkit.options.models import add_model, load_compressor, load_model, trained_folder
from gistkit.options.outputs import check_file
from gistkit.options.texts import STDIN, find_sources

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
    rows = compressor.contexts([text_ids(text, tokenizer)])
    input_rows = compressor.with_bos(rows)
    scores = compressor.whole_scores(input_rows)
    nugget_columns = set(compressor.nuggets(input_rows, scores).index[0].tolist())
    ids = input_rows.ids[0].tolist()
    columns = range(1, len(ids))
    tokens = token_texts(tokenizer, ids[1:])
    selected = [place in nugget_columns for place in columns]
    title = f"{source.name}: {len(nugget_columns)} of {len(tokens)} tokens"
    if out.suffix == ".html":
        from gistkit_lab.viz.text import text_page

        write_text(out, text_page(tokens, scores[0, 1:].tolist(), selected, title=title))
    else:
        from gistkit_lab.viz.text import draw_text

        write_picture(out, draw_text(tokens, scores[0, 1:].tolist(), selected, title=title), dpi=150)
    print(f"{title} kept, {len(tokens) / len(nugget_columns):.1f}x\n")
    table = [["token", "share of nuggets", "share of text"]]
    table += [
        [repr(token), f"{nugget_share:.3f}", f"{text_share:.3f}"]
        for token, nugget_share, text_share in token_types(tokens, selected)[:10]
    ]
    print(format_table([row for row in table if row[1] != "0.000"]))
    print(f"\nWritten: {out}")
    return 0
