"""`gistkit view results`: the table and the pictures of a study's results."""

from __future__ import annotations

import argparse
from typing import Any

from gistkit.options.arguments import add_command, path, typed
from gistkit.options.outputs import check_folder

PURPOSE = "print the table of a study's results, and draw its pictures"
EXAMPLES = """\
example: gistkit view results runs/epl/results.jsonl
         gistkit view results benchmarks/results/length-short.jsonl -o pictures"""


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = add_command(kinds, "results", run, PURPOSE, EXAMPLES)
    parser.set_defaults(words="files")
    parser.add_argument(
        "files",
        type=typed,
        nargs="+",
        metavar="FILE",
        help="results of gistkit study, JSON lines; several files of one study are merged",
    )
    parser.add_argument("-o", "--out", type=path, metavar="FOLDER", help="draw the pictures, as PNG files in FOLDER")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, and writes pictures to --out."""
    if arguments.out is not None:
        check_folder("-o", arguments.out)

    from gistkit_lab.studies import results as files
    from gistkit_lab.studies import shown

    print(shown.table(*arguments.files))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        written = files.save(arguments.out, shown.draw(*arguments.files))
        print("\nWritten: " + (", ".join(map(str, written)) or "none, the study has no pictures"))
    return 0
