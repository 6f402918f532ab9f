"""Data sets of the Hugging Face hub by their names, for whoever has a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What a name begins with where a file could stand too.
PREFIX = "hf:"


def name_of(path: str | Path) -> str | None:
    """The name in "hf:owner/name:configuration"; None for a file or a folder."""
    text = str(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) and not Path(path).exists() else None


def load(name: str, **options: Any) -> Any:
    """What `datasets.load_dataset` returns for "owner/name" or "owner/name:configuration"."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(
            f"dataset {name!r} needs the package datasets; run pip install 'gistkit[datasets]'"
        ) from error
    path, _, configuration = name.partition(":")
    return load_dataset(path, configuration or None, **options)


def rows(name: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of a split, streamed."""
    for index, row in enumerate(load(name, split=split, streaming=True)):
        yield f"{name}, {split}[{index}]", row
