"""Study `smollm2`: position layouts on a real language model, frozen, with LoRA in the encoder.

SmolLM2-135M reconstructs contexts from memory tokens, as keys and values of every layer (500xCompressor) or as
last-layer outputs (ICAE). Only the position IDs differ between the runs of a seed (Position IDs Matter, Tables 1-3 and
the AE-loss curves).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from peft import LoraConfig

from gistkit.compress import METHODS, Compressor
from gistkit.evaluate.report import format_table
from gistkit.train.data import Corpus
from gistkit_lab.studies import models
from gistkit_lab.studies.epl import LIMITS, Epl
from gistkit_lab.studies.pages import machine_caption, runs, seeds
from gistkit_lab.studies.reconstruction import ReconstructionRecipe, Run
from gistkit_lab.studies.rows import Rows, drop_column
from gistkit_lab.studies.study import SavedRun, StudyPlan


@dataclass(frozen=True)
class Recipe(ReconstructionRecipe):
    """Everything that determines a run except its layout and seed; memory tokens and adapter train, in float32.

    Args:
        method: "x500" or "icae".
        rank: of the encoder's LoRA.
        dtype: of the frozen model, "float32" or "bfloat16".
        match_embeddings: see `ICAE`.
        lengths: context tokens in stages of as many steps each, ascending to `chunk`: memory tokens first stand for few
            tokens each, and then for more. (): `chunk` in all steps.
        compression_steps: so many first steps train on the compression loss alone, the others on it and on
            reconstruction; 0: there is no compression loss.
    """

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
    match_embeddings: bool = False
    lengths: tuple[int, ...] = ()
    compression_steps: int = 0

    def __post_init__(self) -> None:
        if self.lengths and (self.lengths[0] < 1 or list(self.lengths) != sorted({*self.lengths, self.chunk})):
            raise ValueError(f"lengths: expected ascending numbers up to chunk, {self.chunk}, got {self.lengths}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.match_embeddings and self.method != "icae":
            raise ValueError(f"match_embeddings: expected it with method icae alone, got method {self.method}")

    def context_at(self, step: int) -> int:
        if not self.lengths:
            return self.chunk
        return self.lengths[min(step * len(self.lengths) // self.steps, len(self.lengths) - 1)]

    def losses_at(self, step: int) -> tuple[str, ...] | None:
        if not self.compression_steps:
            return None
        return ("compression",) if step < self.compression_steps else ("compression", "ae")


CARRIERS = ("x500", "icae")
DTYPES = ("float32", "bfloat16")
LONG = Recipe(chunk=510, ratio=5)
PAPER = replace(LONG, batch=16, steps=20_000, learning_rate=1e-4, warmup=300, weight_decay=0.1, rank=128)
PRESETS = {
    # Minutes a run on two cores.
    "short": Recipe(),
    # Chunks of the papers' size.
    "long": replace(LONG, batch=1, eval_chunks=6, final_chunks=24),
    # Ours: inputs of the size of embeddings, the compression loss first, and 16 memory tokens for 16, 32 and then 64
    # tokens; two hours of a core, or less than one in bfloat16 where the processor has it.
    "staged": Recipe(
        method="icae", match_embeddings=True, lengths=(16, 32, 64), compression_steps=100, steps=1200, batch=2,
        eval_every=100,
    ),
    # The papers' size and schedule, for a GPU.
    "paper": PAPER,
    # Ours: the same in stages, for a GPU.
    "paper-staged": replace(
        PAPER, method="icae", match_embeddings=True, lengths=(64, 128, 510), compression_steps=1000, eval_every=500,
    ),
}  # fmt: skip


def recipe(preset: str, **changes: Any) -> Recipe:
    """The recipe of a preset, such as "short", with some of its values changed."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    return replace(PRESETS[preset], **changes)


def tokenizer(recipe: Recipe) -> Any:
    """The model's tokenizer."""
    return models.smollm2(recipe.dtype)[1]


def build_compressor(recipe: Recipe, layout: str, seed: int) -> Compressor:
    """The untrained compressor of a seed: the same weights whatever the layout."""
    model = copy.deepcopy(models.smollm2(recipe.dtype)[0])
    torch.manual_seed(seed)
    method: Any = METHODS[recipe.method]
    matched = {"match_embeddings": True} if recipe.match_embeddings else {}
    compressor: Compressor = method(
        model,
        chunk=recipe.chunk,
        ratio=recipe.ratio,
        layout=layout,
        losses=("ae", "compression") if recipe.compression_steps else ("ae",),
        **matched,
        lora=LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=["q_proj", "v_proj"]),
    )
    return compressor


class SmolLM2(Epl):
    """Position layouts on a real language model."""

    name = "smollm2"
    recipe_type = Recipe
    last_layer = True
    tokenizer = staticmethod(tokenizer)
    build = staticmethod(build_compressor)

    presets = PRESETS
    preset = "short"
    sizes = (
        "short: minutes a run on a CPU; long: chunks of 510 tokens; staged: ICAE with matched embeddings and contexts "
        "that grow from 16 to 64 tokens, two hours of a core a run; paper, paper-staged: for a GPU"
    )

    changes: ClassVar[Mapping[str, str]] = {
        "method": "default: the preset's, x500 but for the staged ones",
        "match_embeddings": "whether ICAE's outputs get the size of embeddings (default: as the preset; the "
        "staged ones have it)",
        "dtype": "of the frozen model; bfloat16 is faster on processors that multiply in it (default: float32)",
        "learning_rate": "default: the preset's",
    }
    choices: ClassVar[Mapping[str, Sequence[str]]] = {"method": CARRIERS, "dtype": DTYPES}

    def about(self, recipe: Recipe, arms: Sequence[str], source: Corpus) -> str:
        return (
            f"SmolLM2-135M, frozen: {recipe.chunk} tokens from {recipe.chunk // recipe.ratio} memory tokens, LoRA of "
            f"rank {recipe.rank} in the encoder; text {source.name} ({len(source.train)} + {len(source.held_out)} "
            "tokens)"
        )

    def small(self, recipe: Any) -> bool:
        return False

    def variant(self, recipe: Any) -> str:
        stages = "-staged" if recipe.lengths else ""
        matched = "-matched" if recipe.match_embeddings else ""
        dtype = "" if recipe.dtype == DTYPES[0] else f"-{recipe.dtype}"
        return f"{recipe.method}{matched}{stages}{dtype}-{recipe.learning_rate:g}"

    def without_maps(self, run: Run) -> Run:
        return replace(run, attention=run.attention[-1:])

    def rows(self, runs: Sequence[Run], recipe: Any, split: str = "test", method: str = "") -> Rows:
        rows = super().rows(runs, recipe, split, recipe.method)
        # The losses of a curve in stages are those of contexts of several lengths.
        return drop_column(rows, rows[0][1]) if recipe.lengths else rows

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return super().report(runs, plan).removesuffix(f"\n\n{LIMITS}")

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        order = list(PRESETS)
        preset = {id(group): self.preset_of(group[0].recipe) for group in groups}
        tables = []
        for group in sorted(
            groups, key=lambda group: (group[0].recipe.method == "icae", order.index(preset[id(group)]))
        ):
            recipe = group[0].recipe
            rows = self.rows(runs(group), recipe)
            name = {"x500": "500x", "icae": "ICAE"}[recipe.method] + ", matched" * recipe.match_embeddings
            rows[0][0] = f"{name}, {preset[id(group)]}, learning rate {recipe.learning_rate:g}"
            tables.append(
                f"{format_table(drop_column(rows, 'training'))}\n\nHeld-out, {recipe.steps} steps of {recipe.batch} x "
                f"{recipe.chunk} tokens, {recipe.chunk // recipe.ratio} memory tokens, {seeds(group)}"
                f"{_stages(recipe)}{'' if recipe.dtype == DTYPES[0] else f', {recipe.dtype}'}. "
                f"{machine_caption(group)}."
            )
        return "\n\n".join(tables)

    def preset_of(self, run_recipe: Recipe) -> str:
        options = {name: getattr(run_recipe, name) for name in self.changes}
        return next((name for name in PRESETS if recipe(name, **options) == run_recipe), "other")


def _stages(recipe: Recipe) -> str:
    if not recipe.lengths:
        return ""
    return (
        f"; contexts of {', '.join(map(str, recipe.lengths))} tokens one after another, with as many tokens a step; "
        f"{recipe.compression_steps} steps of the compression loss alone"
    )


STUDY = SmolLM2()
