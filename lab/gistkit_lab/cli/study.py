"""`gistkit study`: the papers' experiments, a command for each study of the registry."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.processes import launched
from gistkit.options.arguments import LateParser, add_command, add_device, device, path, positive
from gistkit.options.outputs import check_folder
from gistkit_lab.cli import paper_table
from gistkit_lab.studies import registry

if TYPE_CHECKING:
    from gistkit_lab.studies.results import Line
    from gistkit_lab.studies.study import Job, Study, StudyPlan

COMMITTED = Path("benchmarks/results")
# Of runs, in a folder of results.
CHECKPOINTS = "*/checkpoint-*"


def add(commands: Any) -> None:
    """Adds the command and its studies."""
    parser = commands.add_parser(
        "study", help="run a paper's experiment", epilog="example: gistkit study epl --layouts dpl,epl --seeds 3"
    )
    studies = parser.add_subparsers(required=True, metavar="STUDY", parser_class=LateParser)
    for name in registry.STUDIES:
        purpose, examples = registry.purpose(name)
        command: Any = add_command(studies, name, run, purpose, examples)
        command.set_defaults(study=name, saved=_saved)
        command.fill = partial(add_options, name=name)
    paper_table.add(studies)


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of a study, and those of all studies."""
    registry.find(name).add_options(parser)
    add_device(parser)
    parser.add_argument("--out", type=path, help=f"folder for results (default: {default_out(name)})")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="keep the runs in --out and continue where they stopped")
    begin.add_argument("--overwrite", action="store_true", help="begin anew where --out has runs, and replace them")
    parser.add_argument(
        "--processes", type=positive, metavar="N",
        help="runs side by side (default: as many as the cores can take if models are small, else 1)",
    )  # fmt: skip
    parser.add_argument(
        "--save", nargs="?", type=path, const=COMMITTED, metavar="FOLDER",
        help="add the runs to the committed results, and skip those that exist (default: %(const)s)",
    )  # fmt: skip


def _saved(options: argparse.Namespace) -> str:
    """What an interrupted study has saved, and how to go on."""
    out, kept = options.out or default_out(options.study), options.save is not None
    if not (any(out.glob(CHECKPOINTS)) or (out / "results.jsonl").exists()):
        return "runs that ended are in the results, and nothing else is saved yet" if kept else "nothing is saved yet"
    instead = " in place of --overwrite" if options.overwrite else ""
    return f"{out} has what is saved, and the same command with --resume{instead} goes on from there"


def default_out(name: str) -> Path:
    """The folder of a study's results."""
    return Path("runs") / name


def run(options: argparse.Namespace) -> int:
    """Makes the missing runs, prints their results, and writes results and pictures to --out."""
    # Loads everything that the end needs before the training starts.
    from gistkit import viz as _  # noqa: F401
    from gistkit.info import machine
    from gistkit_lab.studies import results
    from gistkit_lab.studies.runner import run_jobs

    study, processes = registry.find(options.study), launched()
    if processes.count > 1 and not study.shared:
        raise ValueError(
            f"study: expected one that the processes of a launcher can train together, such as length, got {study.name}"
        )
    device_name, out = device(options.device), options.out or default_out(options.study)
    check_folder("--out", out)
    if options.save is not None:
        check_folder("--save", options.save)
    plan = study.plan(options)
    path: Path = out / "results.jsonl"
    if options.save is not None:
        path = options.save / f"{'-'.join(filter(None, (study.name, plan.preset)))}.jsonl"
    keeps = options.resume or options.save is not None
    if not (keeps or options.overwrite):
        check_unused(out)
    if options.overwrite and processes.is_first:
        # What --resume would take for this command's own.
        for old in (out / "results.jsonl", out / "results.npz"):
            old.unlink(missing_ok=True)
        for folder in {old.parent for old in out.glob(CHECKPOINTS)}:
            shutil.rmtree(folder)
    saved_lines = results.load(path) if keeps and path.exists() else []
    lines = saved_by_job(path, study, plan, saved_lines)
    runs = {name: study.run_of(line["run"]) for name, line in lines.items()}
    environment = machine() if options.save is None else results.environment(options.save)
    if plan.about and processes.is_first:
        print(plan.about)
    other_lines = [line for line in saved_lines if line not in lines.values()]
    missing = [job for job in plan.jobs if job.name not in lines]
    if options.save is not None and not (options.resume or options.overwrite):
        check_unused(out, missing)
    # No process writes before all have read.
    processes.gathered(None)
    for job, run in run_jobs(
        study, plan, missing, out, device=device_name, resume=options.resume, processes=options.processes
    ):
        if not processes.is_first:
            continue
        runs[job.name] = run
        kept = run if options.save is None else study.without_maps(run)
        line = results.line(study.name, kept, plan.recipe, plan.source, environment, study.kind)
        if options.save is not None:
            results.append(path, line)
            continue
        lines[job.name] = line
        results.write(path, [*other_lines, *(lines[job.name] for job in plan.jobs if job.name in lines)])
    if not processes.is_first:
        return 0
    plan_runs = [runs[job.name] for job in plan.jobs]
    print(f"\n{study.report(plan_runs, plan)}")
    pictures = results.save(out, study.figures(plan_runs, plan.recipe)) + study.more_pictures(plan, out)
    print("\nWritten: " + ", ".join(map(str, [path, *pictures])))
    return 0


def check_unused(out: Path, jobs: Sequence[Job] | None = None) -> None:
    """Refuses a folder with results or checkpoints of runs, which new runs would replace.

    With `jobs`, runs that write no results there, checkpoints of theirs alone are refused.
    """
    results, states = out / "results.jsonl", sorted(out.glob(CHECKPOINTS))
    if jobs is not None:
        # Further stages of a run have its name, a hyphen and their own.
        names = [f"{job.name}-" for job in jobs]
        states = [state for state in states if f"{state.parent.name}-".startswith(tuple(names))]
    if jobs is None and results.exists():
        found = f"{results} with results"
    elif states:
        found = f"{states[0]}, a checkpoint of a run"
    else:
        return
    raise ValueError(
        f"--out: expected a folder without runs, got {found}; --resume keeps them and goes on, --overwrite begins anew"
    )


def saved_by_job(path: Path, study: Study, plan: StudyPlan, saved_lines: Sequence[Line]) -> dict[str, Line]:
    """The lines of a file that a plan asks for, by the names of its jobs; refused with another recipe or other data."""
    from gistkit_lab.studies.shown import changes

    job_names = {job.name for job in plan.jobs}
    lines: dict[str, Line] = {}
    saved_study, runs = registry.decode_lines(path, list(saved_lines)) if saved_lines else (study, [])
    if saved_study.name != study.name:
        raise ValueError(f"{path}: the saved runs are of the study {saved_study.name}; use another --out folder")
    for line, (run, recipe, *_) in zip(saved_lines, runs, strict=True):
        if study.variant(recipe) != study.variant(plan.recipe):
            continue
        if recipe != plan.recipe:
            differences = changes(plan.recipe, recipe)
            raise ValueError(
                f"{path}: the saved runs differ in {differences}; use the same settings, or another --out folder"
            )
        if plan.source is not None and line.get(study.kind, {}).get("digest") != plan.source.digest:
            raise ValueError(f"{path}: the saved runs have another {study.kind}; use the same, or another --out folder")
        name = f"{study.arm_name(run)}-{study.seed(run)}"
        if name in job_names:
            lines[name] = line
    return lines
