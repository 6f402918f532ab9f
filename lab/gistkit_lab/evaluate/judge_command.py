"""`gistkit judge`: which of two compressors answers better."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.common.processes import launched
from gistkit.options.arguments import add_command, add_questions, existing, path
from gistkit.options.messages import warn
from gistkit.options.outputs import check_file
from gistkit_lab.evaluate.endpoint_options import add_judge, chosen_judge

PURPOSE = "ask a model which of two compressors' answers are better: wins, losses and ties"
EXAMPLES = """\
example: gistkit judge runs/epl.json runs/dpl.json --questions dev.jsonl --judge http://localhost:8000/v1 \\
             --judge-model grader --out runs/epl-dpl.json

Make a report, for example, with
         gistkit evaluate --model ./llama --compressor runs/epl/compressor --questions dev.jsonl --baselines '' \\
             --keep-examples --out runs/epl.json"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "judge", _run, PURPOSE, EXAMPLES)
    parser.add_argument(
        "reports", nargs=2, type=existing, metavar="REPORT", help="report of gistkit evaluate --keep-examples"
    )
    add_questions(parser, "answered in both reports", "validation")
    fields = "{question}, {first}, {second} and perhaps {context}"
    add_judge(parser.add_argument_group("judge"), "says which of two answers is better", fields)
    parser.add_argument(
        "--one-order", action="store_true",
        help="ask once about each pair, with the first report's answer first (default: ask in both orders)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=path, default=Path("runs/judge.json"), metavar="FILE", help="report (default: %(default)s)"
    )


def _run(arguments: argparse.Namespace) -> int:
    check_file("--out", arguments.out, [*arguments.reports, *(arguments.questions or [])])
    if arguments.questions is None or len(arguments.questions) != 1:
        raise ValueError("--questions: expected one set, the one of both reports")
    if not launched().is_first:
        # Only one process asks.
        return 0

    from gistkit.evaluate import Report
    from gistkit.evaluate.metrics import need
    from gistkit.formats import read_questions
    from gistkit_lab.evaluate.pairs import OpenAIPairJudge, compare_answers

    judge = chosen_judge(arguments, OpenAIPairJudge)
    if judge is None:
        raise ValueError("--judge: expected a URL, such as http://localhost:8000/v1, got none")
    first, second = map(Report.load, arguments.reports)
    questions = read_questions(arguments.questions[0], arguments.split)
    with need("tqdm").tqdm(desc="judged", unit="pair") as bar:
        report = compare_answers(
            first, second, questions, judge, both_orders=not arguments.one_order, on_pair=lambda: bar.update(1)
        )
    counts = report.rows[0].counts
    if missing := counts["pairs"] - counts["judged"]:
        warn(f"the judge gave {missing} of {counts['pairs']} pairs no verdict")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report.save(arguments.out)
    print(f"{report.table()}\n\nWritten: {arguments.out}")
    return 0
