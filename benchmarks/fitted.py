"""Compressors of SmolLM2-135M that a script trains before it measures them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gistkit import train
from gistkit.compress import Compressor
from gistkit.hf.smollm2 import load_smollm2

PRESET = "smollm2-small"


def check_same(path: Path, there: Sequence[Any], asked: Any) -> None:
    """Ends the command where arms of a file were trained or measured otherwise than asked: a table has one of both."""
    if others := [one for one in there if one != asked]:
        raise SystemExit(
            f"{path}: expected arms of {asked}, got {others[0]}; use the same options, or begin a new file"
        )


def fitted(
    folder: Path, method: str, recipe: Mapping[str, Any], compressor: Mapping[str, Any], precision: str = "no"
) -> Compressor:
    """The trained compressor, from `folder` where training left it there; training that was interrupted goes on.

    Args:
        recipe, compressor: changes to `PRESET`, see `gistkit.train.run`.
    """
    if not (folder / "compressor").is_dir():
        model, tokenizer = load_smollm2()
        train.run(
            model, tokenizer, folder, method=method, preset=PRESET, recipe=recipe, compressor=compressor,
            resume=folder.exists(), cpu=True, eval_every=None, save_every=60, precision=precision,
        )  # fmt: skip
    return Compressor.from_pretrained(folder / "compressor", load_smollm2()[0]).eval()
