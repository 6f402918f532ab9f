"""`gistkit view run`: a picture of a training run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.common.files import write_picture
from gistkit.options.arguments import add_command, path, positive
from gistkit.options.outputs import check_file

PURPOSE = "draw a training run: losses, learning rate, gradients and speed"
EXAMPLES = """\
example: gistkit view run runs/first
         gistkit view run runs/first --over 50 -o first.png"""


def add(kinds: Any) -> None:
    parser = add_command(kinds, "run", run, PURPOSE, EXAMPLES)
    parser.add_argument("run_folder", type=path, metavar="RUN", help="output folder of gistkit train")
    parser.add_argument(
        "--over", type=positive, metavar="N", help="average over N steps (default: a 50th of the run's)"
    )
    parser.add_argument(
        "-o", "--out", type=path, metavar="FILE", help="picture to write, a .png (default: run.png in RUN)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints how the run ended, and writes the picture."""
    folder: Path = arguments.run_folder
    metrics, out = folder / "metrics.jsonl", arguments.out or folder / "run.png"
    if not metrics.is_file():
        raise FileNotFoundError(f"RUN: expected the folder of a training run, with a metrics.jsonl, got {folder}")
    if out.suffix != ".png":
        raise ValueError(f"-o: expected a file that ends in .png, got {out}")
    check_file("-o", out)

    from gistkit.train.metrics import read_metrics
    from gistkit.viz.run import draw_training_run

    records = read_metrics(metrics)
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise ValueError(f"RUN: {metrics} has no steps yet")
    last = steps[-1]
    seconds = f", {last['seconds']:.0f} s" if "seconds" in last else ""
    print(f"{folder}: {last['step']:,} steps{seconds}, last loss {last['loss']:.4f} nats a token")
    held_out = [record for record in records if record.get("held_out")]
    if held_out:
        losses = ", ".join(f"{name} {value:.4f}" for name, value in held_out[-1]["held_out"].items())
        print(f"held out, after step {held_out[-1]['step']:,}: {losses}")
    picture = draw_training_run(records, over=arguments.over, title=folder.name)
    write_picture(out, picture, dpi=150)
    print(f"Written: {out}")
    return 0
