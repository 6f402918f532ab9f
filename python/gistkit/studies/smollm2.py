"""Study `smollm2`: position layouts on a real language model, frozen, with LoRA in the encoder.

SmolLM2-135M reconstructs contexts from memory tokens, as keys and values of every layer (500xCompressor) or as
last-layer outputs (ICAE). Only the position ids differ between the runs of a seed (Position IDs Matter, Tables 1-3 and
the AE-loss curves).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from gistkit.compress import METHODS, Compressor
from gistkit.evaluate.report import format_table
from gistkit.hf.smollm2 import load_smollm2
from gistkit.studies import report
from gistkit.studies.runs import Schedule, run_study
from gistkit.train import load_corpus


@dataclass(frozen=True)
class Recipe(Schedule):
    """Everything that decides a run but its layout and seed; memory tokens and adapter train, in fp32."""

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
    make: Any = METHODS[recipe.method]
    made: Compressor = make(
        model,
        chunk=recipe.chunk,
        ratio=recipe.ratio,
        layout=layout,
        losses=("ae",),
        lora=LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=["q_proj", "v_proj"]),
    )
    return made


def run_demo(
    out: Path,
    preset: str = "short",
    *,
    layouts: Sequence[str] = ("dpl", "upl", "epl"),
    text: str | Path | None = None,
    device: str = "cpu",
    seeds: int = 1,
    resume: bool = False,
) -> None:
    """Trains 500xCompressor on SmolLM2-135M under position layouts, prints a table and writes figures to `out`.

    Args:
        out: folder for results.json, pictures, and the states that `resume` goes on from.
        preset: "short" (minutes a layout on a CPU), "long" (chunks of 510 tokens) or "paper" (for a GPU).
        layouts: those of `gistkit.compress.FiveHundredX` to run.
        text: file to train on; None: the standard library's topics.
        device: torch device.
        seeds: runs a layout.
        resume: go on where an interrupted run in `out` stopped.
    """
    chosen = recipe(preset)
    corpus = load_corpus(text, tokenizer=tokenizer(chosen))
    print(
        f"SmolLM2-135M, frozen: {chosen.chunk} tokens from {chosen.chunk // chosen.ratio} memory tokens, LoRA of rank "
        f"{chosen.rank} in the encoder; text {corpus.name} ({len(corpus.train)} + {len(corpus.held_out)} tokens)"
    )
    runs = []
    studied = run_study(
        chosen, build_compressor, list(layouts), list(range(seeds)), corpus, out, device=device, resume=resume
    )
    for run in studied:
        runs.append(run)
        report.write_json(out / "results.json", runs, chosen, corpus, study="smollm2")
    print(format_table(report.table_rows(runs, chosen.method)))
    print("\nOne held-out passage, reconstructed greedily:")
    print(report.format_passages(runs))
    print()
    print(report.format_tracking(runs, chosen))
    pictures = report.draw(out, runs, chosen, last_layer=True)
    print("\nWritten: " + ", ".join(map(str, [out / "results.json", *pictures])))
