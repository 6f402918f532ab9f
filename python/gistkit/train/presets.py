"""Presets: the papers' experiments by name, each with what it follows and what its paper does not say."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from gistkit.train.recipe import Recipe


@dataclass(frozen=True)
class Preset:
    """A recipe, the compressor it was made for, and where both come from.

    Args:
        recipe: the schedule.
        compressor: keyword arguments of the method, the layout left out. A "lora" may be the keyword arguments of a
            peft.LoraConfig.
        method: of `gistkit.compress.METHODS`.
        tau, segment: of the language model that reads with the compressor, instead of losses; None: there is none.
        longer_than: characters of the texts that have a passage each, see `gistkit.train.Windows`; None: passages are
            at random places of the joined text.
        rows: of the paper's training data, for plans of epochs; None: it has none.
        row_length: mean number of tokens of a row of questions, for plans; None: they count the longest.
        model: the paper's.
        data: the paper's.
        follows: the paper and where it says so.
        open: what the paper does not say, and what is chosen here.
    """

    recipe: Recipe = field(default_factory=Recipe)
    compressor: Mapping[str, Any] = field(default_factory=dict)
    method: str = "x500"
    tau: int | None = None
    segment: int | None = None
    longer_than: int | None = None
    rows: int | None = None
    row_length: int | None = None
    model: str = "any"
    data: str = "any"
    follows: str = "no paper"
    open: tuple[str, ...] = ()


def _read() -> dict[str, Preset]:
    """The presets of presets.toml, in its order."""
    found: dict[str, Preset] = {}
    for name, values in tomllib.loads(files("gistkit.train").joinpath("presets.toml").read_text("utf-8")).items():
        base = found[values.pop("like")] if "like" in values else Preset()
        recipe, compressor = values.pop("recipe", {}), values.pop("compressor", {})
        recipe |= {"betas": tuple(recipe["betas"])} if "betas" in recipe else {}
        # TOML has no None.
        compressor |= {"lora": None} if compressor.get("lora") is False else {}
        compressor |= {"losses": tuple(compressor["losses"])} if "losses" in compressor else {}
        values |= {"open": tuple(values["open"])} if "open" in values else {}
        found[name] = replace(
            base, **values, recipe=replace(base.recipe, **recipe), compressor={**base.compressor, **compressor}
        )
    return found


PRESETS: Mapping[str, Preset] = _read()
# SeqPE's experiments train models of their own, not compressors.
STUDIES = (
    "gistkit study length --preset seqpe-wikitext, gistkit study retrieval --preset seqpe-squad and gistkit study "
    "resolution --preset seqpe-imagenet"
)


def find_preset(name: str) -> Preset:
    """The preset of that name; SeqPE's experiments are studies, and the error names their commands."""
    if name.startswith("seqpe"):
        raise ValueError(f"preset: expected one that trains a compressor, got {name}; SeqPE's are {STUDIES}")
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def notes(name: str) -> str:
    """What a preset follows, and what its paper does not say, in lines."""
    preset = find_preset(name)
    lines = [f"{name} follows {preset.follows}", f"  its model: {preset.model}", f"  its data: {preset.data}"]
    if preset.open:
        lines.append("  what the paper does not say, and what is chosen here:")
    return "\n".join([*lines, *(f"  - {point}" for point in preset.open)])
