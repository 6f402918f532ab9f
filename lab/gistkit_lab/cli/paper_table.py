"""`gistkit study paper-table`: a table of a paper, from the training of its rows to the paper's figures beside ours."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli import evaluate, train
from gistkit.common.files import write_picture, write_text
from gistkit.options.arguments import Parser, add_command, add_device, number, path, positive
from gistkit.options.models import DTYPES, add_model_name
from gistkit.options.outputs import check_folder
from gistkit_lab.evaluate import judge_command

if TYPE_CHECKING:
    from gistkit_lab.tables.table import Run

EXAMPLES = """\
example: gistkit study paper-table epl-4 --model ./llama-1b --dry-run
example: gistkit study paper-table epl-4 --model ./llama-1b --dtype bfloat16 --data text=slimpajama/ \\
             --data train=mrqa/train --data test=mrqa/dev --more 'pretrain=--precision bf16'
example: gistkit study paper-table gistpool-squad --model ./gemma --data train=train.json --data test=dev.json \\
             --arms 'AvgPool 5x;GistPool 5x' --measure 5
example: gistkit study paper-table dodo-1 --model ./llama --data text=pile/ --data wikitext=wiki.test.tokens \\
             --launcher 'accelerate launch --num_processes 8 -m gistkit.cli'"""
# What one GPU does in a second where nothing was measured: 40% of the dense bfloat16 peak of an H100, 989 TFLOP/s.
TFLOPS = 400.0
COMMAND = "command.json"


PURPOSE = "make a table of a paper, from the training of its rows to the paper's figures beside ours"


def add(studies: Any) -> None:
    """Adds the command to parsers that get their options when they are used."""
    parser: Any = add_command(studies, "paper-table", _run, PURPOSE, EXAMPLES)
    parser.set_defaults(saved=_saved)
    parser.fill = _add_options


def _add_options(parser: argparse.ArgumentParser) -> None:
    from gistkit_lab.tables import TABLES

    parser.add_argument("table", metavar="NAME", help=f"one of {', '.join(TABLES)}")
    add_model_name(parser, "smollm2")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (default: %(default)s)")
    add_device(parser)
    parser.add_argument(
        "--data", type=_named, action="append", default=[], metavar="NAME=PATH",
        help="a file or folder that the table needs; repeated for each, and for several of a name",
    )  # fmt: skip
    parser.add_argument("--arms", type=_titles, metavar="A;B;..", help="some of its rows (default: all)")
    parser.add_argument(
        "--out", type=path, help="folder of its runs, shared by tables of the paper (default: runs/PAPER)"
    )
    parser.add_argument(
        "--more", type=_options, action="append", default=[], metavar="STAGE=OPTIONS",
        help="more options for the commands of a stage, such as 'pretrain=--precision bf16', or of all whose names "
        "begin so up to a hyphen, as answers-squad with answers; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--launcher", type=shlex.split, metavar="WORDS",
        help="starts each command in processes of its own, such as 'accelerate launch -m gistkit.cli' (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="run nothing; list the commands, and estimate the hours of training from the model's configuration",
    )  # fmt: skip
    parser.add_argument(
        "--measure", type=positive, metavar="N",
        help="as --dry-run, with hours from the time of N steps of each training on this device, with model and data",
    )  # fmt: skip
    parser.add_argument(
        "--tflops", type=number(0), default=TFLOPS, metavar="N",
        help="of one GPU in training, where steps are not measured (default: %(default)g, 40%% of an H100's peak)",
    )  # fmt: skip


def _named(text: str) -> tuple[str, str]:
    """A kind of argument: (name, value) of "name=value"."""
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _options(text: str) -> tuple[str, list[str]]:
    """A kind of argument: (stage, words) of "stage=words"."""
    name, value = _named(text)
    return name, shlex.split(value)


def _titles(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _saved(arguments: argparse.Namespace) -> str:
    """What an interrupted table has saved, and how to go on."""
    return "the runs that ended are kept, and the same command goes on with the others"


def _run(arguments: argparse.Namespace) -> int:
    from gistkit_lab.tables import find_table
    from gistkit_lab.tables.table import Choices, missing_data, runs

    table = find_table(arguments.table)
    if arguments.arms is not None:
        table = table.choose(arguments.arms)
    shared = ["--dtype", arguments.dtype]
    if arguments.device is not None:
        shared += ["--device", arguments.device]
    data: dict[str, list[str]] = {}
    for name, value in arguments.data:
        data.setdefault(name, []).append(value)
    out = arguments.out or Path("runs") / table.paper
    more: dict[str, list[str]] = {}
    for name, words in arguments.more:
        more.setdefault(name, []).extend(words)
    choices = Choices(arguments.model, out, data, shared, more)
    planned = list(runs(table, choices))
    print(table.about)
    needs_data = arguments.measure is not None or not arguments.dry_run
    if needs_data and (missing := missing_data(table, choices.data)):
        raise ValueError(f"--data: expected {', '.join(f'{name}=PATH' for name in missing)}, got none")
    if arguments.dry_run or arguments.measure is not None:
        print(_plan(planned, arguments))
        return 0
    if table.picture:
        # What is missing is missed before the first run.
        from gistkit import viz as _  # noqa: F401
    check_folder("--out", choices.out)
    for index, run in enumerate(planned, start=1):
        print(f"\n[{index}/{len(planned)}] {run.title}: gistkit {shlex.join(run.words)}", flush=True)
        if status := _make(run, arguments.launcher):
            return status
    shown = table.markdown(choices.out)
    file = choices.out / f"{arguments.table}.md"
    write_text(file, f"{table.about}\n\n{shown}\n")
    written = [file]
    if table.picture:
        from gistkit_lab.viz import draw_bleu_by_length

        written.append(file.with_suffix(".png"))
        write_picture(written[1], draw_bleu_by_length(table.by_length(choices.out)), dpi=150)
    print(f"\n{shown}\n\nWritten: {', '.join(map(str, written))}")
    return 0


def _make(run: Run, launcher: Sequence[str] | None) -> int:
    """Runs a command whose result is not there yet; its status. Results of other commands or sources are refused."""
    from gistkit.train import checkpoints

    before, sources = _recorded(run.folder), [_recorded(folder).get("id") for folder in run.sources]
    made_by = ""
    if before and before["words"] != list(run.words):
        made_by = f"by gistkit {shlex.join(before['words'])}"
    elif before and (before["sources"] or [None] * len(sources)) != sources:
        made_by = f"before {' and '.join(map(str, run.sources))} was made anew"
    if made_by:
        raise ValueError(
            f"--out: expected a folder of the same runs, got {run.folder}, made {made_by}; remove it, or use another "
            "--out"
        )
    if before and run.result.exists():
        print("is there already")
        return 0
    run.folder.mkdir(parents=True, exist_ok=True)
    goes_on = checkpoints.find(run.folder)
    made = {"words": list(run.words), "id": before["id"] if before and goes_on else uuid.uuid4().hex}
    write_text(run.folder / COMMAND, json.dumps({**made, "sources": sources}) + "\n")
    words = [*run.words, "--resume"] if goes_on else run.words
    return _call(words) if launcher is None else subprocess.run([*launcher, *words], check=False).returncode


def _recorded(folder: Path) -> dict[str, Any]:
    """The words that a folder's run was made with, its id, and those of the runs that it starts from; {}: unknown."""
    path = folder / COMMAND
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # Earlier files have the words alone.
    return {"words": found, "id": None, "sources": None} if isinstance(found, list) else found


def _call(words: Sequence[str]) -> int:
    """Runs `gistkit` with these words in this process; its status."""
    parser = Parser(prog="gistkit")
    commands = parser.add_subparsers(parser_class=Parser)
    for command in (train, evaluate, judge_command):
        command.add(commands)
    arguments = parser.parse_args(words)
    status: int = arguments.run(arguments)
    return status


def _plan(planned: Iterable[Run], arguments: argparse.Namespace) -> str:
    """The runs with their commands, and the hours of each training and of all."""
    from gistkit.evaluate.report import format_table

    lines, commands, unknown, total = [["run", "steps", "operations a step", "hours"]], [], list[str](), 0.0
    for run in planned:
        steps = operations = shown = "-"
        if run.new:
            steps, operations, hours = _cost(run, arguments)
            shown = "-" if hours is None else f"{hours:.2f}"
            total += hours or 0.0
            unknown += [run.title] if hours is None else []
        lines.append([run.title, steps, operations, shown])
        commands.append(f"# {run.title}\ngistkit {shlex.join(run.words)}")
    source = f"{arguments.tflops:g} TFLOP/s" if arguments.measure is None else f"{arguments.measure} steps of each"
    note = f"{'at least ' if unknown else ''}{total:.1f} hours of training on one device, from {source}. Evaluations "
    note += "are not counted; epochs are of the paper's data, and questions count as long as theirs on average, or "
    note += "else as the longest."
    if unknown:
        note += f" Left out, as nobody knows how many rows their data has: {'; '.join(unknown)}."
    return "\n\n".join(["", format_table(lines), note, *commands])


def _cost(run: Run, arguments: argparse.Namespace) -> tuple[str, str, float | None]:
    """A training's steps, operations a step, and hours; None where nobody knows how many rows its epochs have."""
    from gistkit.train.presets import find_preset

    made = train.dry_run_of(run.new[1:])
    recipe, rows = made.recipe, find_preset(made.preset).rows
    if recipe.epochs is not None and rows is None:
        return f"{recipe.epochs:g} epochs", f"{made.operations:.2g}", None
    about, steps = "" if recipe.epochs is None else "about ", recipe.for_rows(rows).steps
    seconds = made.operations / (arguments.tflops * 1e12)
    if arguments.measure is not None:
        seconds = _measured(run.new, arguments.measure)
    return f"{about}{steps:,}", f"{made.operations:.2g}", steps * seconds / 3600


def _measured(words: Sequence[str], steps: int) -> float:
    """Seconds of a step of a training, the mean of some after a first one."""
    from gistkit.train import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        short = ["--steps", str(steps + 1), "--eval-every", str(steps + 2), "--held-out", "1", "--out", folder]
        _call([*words, *short])
        records = [each for each in read_metrics(Path(folder) / "metrics.jsonl") if "seconds" in each]
    return float(records[-1]["seconds"] - records[0]["seconds"]) / steps
