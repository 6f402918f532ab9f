"""What a study's runs gave: a cell of a table, JSON with the recipe, the text and the machine, and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = TypeVar("Run")
Recipe = TypeVar("Recipe")


def spread(values: Sequence[float], form: Callable[[float], str] = "{:.3f}".format) -> str:
    """A cell of a table: one value as it is; several seeds' as mean (lowest-highest)."""
    if len(values) == 1:
        return form(values[0])
    return f"{form(mean(values))} ({form(min(values))}-{form(max(values))})"


class Source(Protocol):
    """What a study read: texts or images."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...


def write(
    path: Path,
    study: str,
    runs: Sequence[Any],
    recipe: Any,
    source: Source | None,
    machine: Mapping[str, object],
    kind: str = "text",
) -> None:
    """Writes runs and their recipe, dataclasses of JSON values; `source` is None where nothing is read."""
    content = {
        "study": study,
        "machine": dict(machine),
        **({} if source is None else {kind: {"name": source.name, "digest": source.digest}}),
        "recipe": asdict(recipe),
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path, run: Callable[..., Run], recipe: Callable[..., Recipe]) -> tuple[list[Run], Recipe]:
    """The runs and recipe that `write` wrote, made by their classes."""
    content = json.loads(path.read_text())
    return [run(**one) for one in content["runs"]], recipe(**content["recipe"])


def save(folder: Path, figures: Mapping[str, Figure], prefix: str = "") -> list[Path]:
    """Writes each figure as the PNG file of its name in `folder`."""
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{prefix}{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths
