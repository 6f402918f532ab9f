"""`gistkit view matrix`: one metric of compressors, by training set and test set."""

from __future__ import annotations

import argparse
from typing import Any

from gistkit.options.arguments import add_command

PURPOSE = "print a table of one metric by training set and test set, from reports of gistkit evaluate"
EXAMPLES = """\
example: gistkit view matrix runs/squad-drop.json runs/squad-squad.json runs/drop-drop.json
         gistkit view matrix runs/*-*.json --metric qa_exact_match

Make a report, for example, with
         gistkit evaluate --model ./llama --compressor runs/squad/compressor --questions drop.jsonl \\
             --trained-on squad --tested-on drop --out runs/squad-drop.json"""


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = add_command(kinds, "matrix", run, PURPOSE, EXAMPLES)
    parser.set_defaults(words="files")
    parser.add_argument("files", nargs="+", metavar="FILE", help="reports, each of one training set and one test set")
    parser.add_argument(
        "--metric", default="qa_loss", metavar="NAME", help="metric of a report's rows (default: %(default)s)"
    )
    parser.add_argument("--method", metavar="NAME", help="row of each report (default: the one that is not a baseline)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    from gistkit_lab.evaluate.cross import cross_table

    print(cross_table(arguments.files, metric=arguments.metric, method=arguments.method))
    return 0
