"""The trained compressors that come with gistkit, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# In an installed package, and in the sources.
PLACES = (Path(__file__).parents[1] / "trained", Path(__file__).parents[3] / "models")
# The one that commands take where none is named, for a model as `--model` names it.
DEFAULTS: Mapping[str, str] = {"smollm2": "smollm2-select-4x"}
SETTINGS = "compressor.json"


def trained() -> dict[str, Path]:
    """The folder of each trained compressor, by name; `Compressor.from_pretrained` takes the names too.

    The README.md in each folder describes its training and its quality.
    """
    place = next((place for place in PLACES if place.is_dir()), None)
    if place is None:
        return {}
    return {path.parent.name: path.parent for path in sorted(place.glob(f"*/{SETTINGS}"))}


def find(name: str | Path) -> Path:
    """The folder that a path or a trained compressor's name stands for; a folder that exists comes first."""
    path = Path(name)
    return path if path.is_dir() else trained().get(str(name), path)


def default_for(model: str) -> str | None:
    """The name of the trained compressor for a model by its name, None if there is none."""
    name = DEFAULTS.get(model)
    return name if name in trained() else None
