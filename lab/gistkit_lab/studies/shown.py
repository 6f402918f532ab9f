"""Tables and pictures of results files of any study."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit_lab.studies.registry import decode_lines
from gistkit_lab.studies.results import load
from gistkit_lab.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(*paths: Path | str) -> str:
    """The table of a study's results; if a file holds several variants, a table for each, below its name.

    Args:
        paths: a results file, or several of one study and recipe, whose runs are merged.

    Raises:
        ValueError: if a file holds something else, or files have different studies or recipes, or share runs.
    """
    study, variants = _read(paths)
    tables = {name: study.table(runs, recipe) for name, (runs, recipe) in variants.items()}
    return "\n\n".join(f"{name}:\n{text}" if name else text for name, text in tables.items())


def draw(*paths: Path | str) -> dict[str, Figure]:
    """The pictures of a study's results, by name, if it has any. Arguments and errors as of `table`."""
    study, variants = _read(paths)
    return {
        f"{variant}-{name}" if variant else name: figure
        for variant, (runs, recipe) in variants.items()
        for name, figure in study.figures(runs, recipe).items()
    }


def _read(paths: tuple[Path | str, ...]) -> tuple[Study, dict[str, tuple[list[Any], Any]]]:
    """The study; and for each variant, its runs and their recipe."""
    if not paths:
        raise ValueError("paths: expected at least one results file, got none")
    first = Path(paths[0])
    study: Study | None = None
    variants: dict[str, tuple[list[Any], Any]] = {}
    for path in map(Path, paths):
        file_study, runs = decode_lines(path, load(path))
        if study is not None and file_study is not study:
            raise ValueError(f"{path}: expected results of the study {study.name}, as {first}, got {file_study.name}")
        study = file_study
        for run, recipe, *_ in runs:
            variant_runs, variant_recipe = variants.setdefault(study.variant(recipe), ([], recipe))
            if recipe != variant_recipe:
                raise ValueError(
                    f"{path}: expected the recipe of {first}, got another {changes(variant_recipe, recipe)}"
                )
            if run in variant_runs:
                raise ValueError(f"{path}: expected each run once, got some a second time")
            variant_runs.append(run)
    assert study is not None
    return study, variants


def changes(first: Any, second: Any) -> str:
    """The names of the fields in which two recipes differ."""
    first_fields, second_fields = asdict(first), asdict(second)
    return ", ".join(name for name in first_fields if first_fields[name] != second_fields.get(name))
