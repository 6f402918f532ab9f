"""A study's runs, a file each: those that are missing are made, those that are there are read or drawn."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import harness
from tqdm import tqdm

# A run, its recipe, and the machine it was made on.
Found = tuple[Any, Any, dict[str, object]]


def read(folder: Path, read_json: Callable[[Path], tuple[list[Any], Any]]) -> dict[str, list[Found]]:
    """The runs in a folder, by preset and number of steps, such as short-100; those of a quick preset last."""
    found: dict[str, list[Found]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.name.startswith("quick"), path.name)):
        name = "-".join(path.name.split("-")[:2])
        machine = json.loads(path.read_text())["machine"]
        runs, recipe = read_json(path)
        found.setdefault(name, []).extend((run, recipe, machine) for run in runs)
    return found


def parser(description: str | None, presets: Collection[str], methods: Iterable[str], work: Path) -> Any:
    """The command line that these scripts share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--preset", default="short", choices=sorted(presets), help="default: %(default)s")
    options.add_argument("--methods", default=",".join(methods), help="comma-separated (default: %(default)s)")
    options.add_argument("--seeds", default="0", help="comma-separated (default: %(default)s)")
    options.add_argument("--steps", type=int, help="default: the preset's")
    options.add_argument("--device", default="cpu", help="default: %(default)s")
    options.add_argument("--work", type=Path, default=work, help="for states (default: %(default)s)")
    options.add_argument("--draw", action="store_true", help="make no runs; draw those that are there")
    return options


def make(
    options: argparse.Namespace,
    recipe: Any,
    arms: Iterable[Any],
    folder: Path,
    train: Callable[[Any, int, Path, Any], Any],
    write: Callable[[Path, Any, dict[str, object]], None],
) -> None:
    """Makes the runs that are missing; one that another process has begun is left to it.

    Args:
        options: from `parser`.
        recipe, arms: what to run, for each of the seeds.
        folder: of results.
        train: of (arm, seed, folder of states, progress bar), a run.
        write: of (file, run, environment).
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = options.work / f"{options.preset}-{recipe.steps}"
    arms = list(arms)
    for seed in map(int, options.seeds.split(",")):
        for arm in arms:
            name = f"{options.preset}-{recipe.steps}-{arm.name}-{seed}"
            path, begun = folder / f"{name}.json", work / f"{arm.name}-{seed}"
            if path.exists() or begun.exists():
                continue
            begun.mkdir(parents=True)
            with tqdm(total=recipe.steps, desc=name, unit="step", dynamic_ncols=True) as bar:
                run = train(arm, seed, work, bar)
            write(path, run, harness.environment())
