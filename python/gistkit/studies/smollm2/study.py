"""Study `smollm2`: position layouts on a real language model, frozen, with LoRA in the encoder.

SmolLM2-135M reconstructs contexts from memory tokens, as keys and values of every layer (500xCompressor) or as
last-layer outputs (ICAE). Only the position ids differ between the runs of a seed (Position IDs Matter, Tables 1-3 and
the AE-loss curves).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from peft import LoraConfig

from gistkit.compress import METHODS, Compressor
from gistkit.hf.smollm2 import load_smollm2
from gistkit.studies.reconstruction import ReconstructionRecipe


@dataclass(frozen=True)
class Recipe(ReconstructionRecipe):
    """Everything that determines a run except its layout and seed; memory tokens and adapter train, in fp32."""

    steps: int = 96
    chunk: int = 64
    ratio: int = 4
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    clip: float = 2.0
    eval_every: int = 32
    eval_chunks: int = 24
    final_chunks: int = 128
    method: str = "x500"
    rank: int = 64
    dtype: str = "float32"


CARRIERS = ("x500", "icae")
LONG = Recipe(chunk=510, ratio=5)
PRESETS = {
    # Minutes a run on two cores.
    "short": Recipe(),
    # Chunks of the papers' size.
    "long": replace(LONG, batch=1, eval_chunks=6, final_chunks=24),
    # The papers' size and schedule, for a GPU.
    "paper": replace(LONG, batch=16, steps=20_000, learning_rate=1e-4, warmup=300, weight_decay=0.1, rank=128),
}


def recipe(preset: str, **changes: Any) -> Recipe:
    """The recipe of a preset ("short", "long" or "paper") with some of its values changed."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    return replace(PRESETS[preset], **changes)


@lru_cache(maxsize=1)
def _base(dtype: str) -> Any:
    return load_smollm2(dtype=getattr(torch, dtype))


def tokenizer(recipe: Recipe) -> Any:
    """The model's tokenizer."""
    return _base(recipe.dtype)[1]


def build_compressor(recipe: Recipe, layout: str, seed: int) -> Compressor:
    """The untrained compressor of a seed: the same weights whatever the layout."""
    model = copy.deepcopy(_base(recipe.dtype)[0])
    torch.manual_seed(seed)
    method: Any = METHODS[recipe.method]
    compressor: Compressor = method(
        model,
        chunk=recipe.chunk,
        ratio=recipe.ratio,
        layout=layout,
        losses=("ae",),
        lora=LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=["q_proj", "v_proj"]),
    )
    return compressor
