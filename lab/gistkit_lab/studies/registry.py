"""The studies by name. Each folder's `PURPOSE` and `EXAMPLES` load at once, its `command` only when used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gistkit_lab.studies.results import Line
    from gistkit_lab.studies.study import Study

# In the order of the commands.
STUDIES = (
    "compression-loss", "epl", "smollm2", "in-place", "pairs", "nuggets", "facts", "pooling", "greedy", "length",
    "retrieval", "resolution", "voco",
)  # fmt: skip


class SavedRun(NamedTuple):
    """A run from a results file; `source` is the name of its text or images."""

    run: Any
    recipe: Any
    machine: dict[str, Any]
    source: str = ""


def purpose(name: str) -> tuple[str, str]:
    """The purpose of a study, in a line, and examples of its command."""
    folder = import_module(f"gistkit_lab.studies.{name.replace('-', '_')}")
    return folder.PURPOSE, folder.EXAMPLES


def find(name: str) -> Study:
    """The study of a name.

    Raises:
        ValueError: if there is none.
    """
    if name not in STUDIES:
        raise ValueError(f"study: expected one of {', '.join(STUDIES)}, got {name!r}")
    study: Study = import_module(f"gistkit_lab.studies.{name.replace('-', '_')}.command").STUDY
    return study


def decode_lines(path: Path | str, lines: list[Line]) -> tuple[Study, list[SavedRun]]:
    """The study of a results file's lines, and its runs.

    Raises:
        ValueError: if the lines belong to no study, or to several.
    """
    if not lines:
        raise ValueError(f"{path}: expected at least one run, got none")
    name = lines[0]["study"]
    if name not in STUDIES:
        raise ValueError(f"{path}: expected results of one of the studies {', '.join(STUDIES)}, got study {name!r}")
    if other_names := {line["study"] for line in lines} - {name}:
        raise ValueError(f"{path}: expected results of the study {name} alone, got {other_names.pop()} too")
    study = find(name)
    try:
        runs = [
            SavedRun(
                study.run_of(line["run"]),
                study.recipe_of(line["recipe"]),
                line.get("machine", {}),
                line.get(study.kind, {}).get("name", ""),
            )
            for line in lines
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected results of the study {name}, got others: {error!r}") from error
    return study, runs


def read(path: Path | str) -> list[SavedRun]:
    """The runs of a study's results file, in its order.

    Raises:
        ValueError: if it holds something else.
    """
    from gistkit_lab.studies.results import load

    return decode_lines(path, load(Path(path)))[1]
