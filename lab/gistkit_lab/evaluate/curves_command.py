"""`gistkit view curves`: compares training curves of several runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.common.files import write_picture
from gistkit.options.arguments import add_command, number, path, positive, typed
from gistkit.options.outputs import check_file

PURPOSE = "print how soon training runs reach a loss, and draw their curves"
EXAMPLES = """\
example: gistkit view curves runs/epl runs/dpl -o curves.png
         gistkit view curves runs/epl runs/dpl --loss ae --goal 0.01"""


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = add_command(kinds, "curves", run, PURPOSE, EXAMPLES)
    parser.set_defaults(words="runs")
    parser.add_argument("runs", type=typed, nargs="+", metavar="RUN", help="output folder of gistkit train")
    parser.add_argument("--loss", default="ae", metavar="NAME", help="loss to compare (default: %(default)s)")
    parser.add_argument(
        "--goal", type=number(0), default=0.01, help="loss to reach, in nats a token (default: %(default)s)"
    )
    parser.add_argument(
        "--over", type=positive, default=10, metavar="N", help="average the loss over N steps (default: %(default)s)"
    )
    parser.add_argument("-o", "--out", type=path, metavar="FILE", help="also draw the losses of all runs, as a .png")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, and writes the picture to --out."""
    from gistkit.evaluate.report import format_table
    from gistkit.train.metrics import read_metrics
    from gistkit_lab.evaluate.curves import steps_to, training_curves

    if arguments.out is not None:
        if arguments.out.suffix != ".png":
            raise ValueError(f"-o: expected a file that ends in .png, got {arguments.out}")
        check_file("-o", arguments.out)
    records = {name: read_metrics(Path(name) / "metrics.jsonl") for name in arguments.runs}
    curves = {name: training_curves(each, arguments.over) for name, each in records.items()}
    lines = [["run", f"steps to {arguments.loss} {arguments.goal:g}", f"last {arguments.loss}", "steps"]]
    for name, each in records.items():
        curve = curves[name].get(arguments.loss)
        reached = steps_to(each, arguments.goal, arguments.loss, arguments.over)
        last = f"{curve[-1][1]:.4f}" if curve else "-"
        most = f"{max((record['step'] for record in each), default=0):,}"
        lines.append([name, "-" if reached is None else f"{reached:,}", last, most])
    print(format_table(lines))
    if arguments.out is not None:
        from gistkit_lab.viz.curves import draw_training_curves

        # The loss that is counted comes first.
        ordered = {
            name: dict(sorted(each.items(), key=lambda item: item[0] != arguments.loss))
            for name, each in curves.items()
        }
        write_picture(arguments.out, draw_training_curves(ordered, goal=arguments.goal), dpi=150)
        print(f"\nWritten: {arguments.out}")
    return 0
