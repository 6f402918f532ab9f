"""Captions of the tables of committed results, with the machines of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gistkit_lab.studies.registry import read
from gistkit_lab.studies.study import SavedRun


def committed(folder: Path, study: str) -> list[list[SavedRun]]:
    """The committed runs of a study in a folder, grouped by file and recipe; quick presets come last."""
    groups: list[list[SavedRun]] = []
    paths = [*folder.glob(f"{study}.jsonl"), *folder.glob(f"{study}-*.jsonl")]
    for path in sorted(paths, key=lambda path: (path.stem.endswith("-quick"), path.name)):
        file_groups: list[list[SavedRun]] = []
        for run in read(path):
            group = next((members for members in file_groups if members[0].recipe == run.recipe), None)
            if group is None:
                file_groups.append([run])
            else:
                group.append(run)
        groups += file_groups
    return groups


def machine_line(machine: Mapping[str, Any]) -> str:
    """One line with the machine and the commit."""
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (
        f"{machine['processor']}, {threads}, {machine['instruction_set']}, "
        f"torch {machine['torch']}, commit {machine['commit']}"
    )


def machines_line(machines: Sequence[Mapping[str, Any]]) -> str:
    """One line with several machines and commits, in the order of the runs."""
    lines: dict[str, list[str]] = {}
    for machine in machines:
        machine_name, _, commit = machine_line(machine).rpartition(", commit ")
        lines.setdefault(machine_name, []).append(commit)
    return "; ".join(
        f"{machine_name}, commit{'s' if len(set(commits)) > 1 else ''} {', '.join(dict.fromkeys(commits))}"
        for machine_name, commits in lines.items()
    )


def machine_caption(group: Sequence[SavedRun]) -> str:
    """`machines_line` of a group of runs."""
    return machines_line([run.machine for run in group])


def runs(group: Sequence[SavedRun]) -> list[Any]:
    """The runs without recipe and machine."""
    return [saved.run for saved in group]


def seeds(group: Sequence[SavedRun]) -> str:
    """The number of seeds, such as "3 seeds"."""
    count = len({saved.run.seed for saved in group})
    return f"{count} seed{'s' if count > 1 else ''}"


def model_line(recipe: Any) -> str:
    """The model of a recipe, as the start of a caption."""
    if recipe.model == "smollm2":
        return "SmolLM2-135M with LoRA"
    return f"A Llama of 0.6M parameters on bytes, after {recipe.base_steps} steps from scratch that the arms share"
