"""What a study's runs gave as JSON: everything measured, with the recipe, the text and the machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gistkit.train.data import Corpus

Run = TypeVar("Run")
Recipe = TypeVar("Recipe")


def write(
    path: Path, study: str, runs: Sequence[Any], recipe: Any, corpus: Corpus, machine: Mapping[str, object]
) -> None:
    """Writes runs and their recipe, dataclasses of JSON values."""
    content = {
        "study": study,
        "machine": dict(machine),
        "text": {"name": corpus.name, "digest": corpus.digest},
        "recipe": asdict(recipe),
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path, run: Callable[..., Run], recipe: Callable[..., Recipe]) -> tuple[list[Run], Recipe]:
    """The runs and recipe that `write` wrote, made by their classes."""
    content = json.loads(path.read_text())
    return [run(**one) for one in content["runs"]], recipe(**content["recipe"])
