"""Selections that models/ has: the adapter of a trained compressor around what `Select` keeps. Nothing is trained here.

example: OMP_NUM_THREADS=1 python lab/models/selection.py smollm2-select-4x
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make import FOLDER, MODELS, Model, new_compressor, save

from gistkit.compress import Compressor
from gistkit.compress.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from gistkit.hf.smollm2 import load_smollm2


@dataclass(frozen=True)
class Selection:
    """A selection around the adapter of one of `MODELS`.

    Args:
        adapter: the name of that model, whose memory is read with an adapter for the text.
        settings: of `Select`.
    """

    adapter: str
    settings: Mapping[str, Any]


# Of 50 questions by hand 8x answers 36% exactly and 16x 28%, 4x 42% and the whole text 52%.
SELECTIONS = {"smollm2-select-4x": Selection("smollm2-avgpool-2x", {"ratio": 4, "by": "kvzip", "shares": "all"})}


def build(name: str, out: Path | None = None) -> Path:
    """Writes a selection's compressor; its adapter's files are those of the trained one, byte for byte."""
    one = SELECTIONS[name]
    source, folder = FOLDER / one.adapter, out or FOLDER / name
    trained = Compressor.from_pretrained(source, load_smollm2()[0])
    made = new_compressor(Model("select", one.settings, (), rank=MODELS[one.adapter].rank), losses=("qa",))
    made.trained_length = trained.trained_length
    save(made, folder)
    assert trained.adapters is not None and made.adapters is not None
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(source / trained.adapters.names["text"] / file, folder / made.adapters.names["text"] / file)
    return folder
