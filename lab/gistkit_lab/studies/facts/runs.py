"""Runs of the study `facts`: trains and measures one selection and seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gistkit.compress import AvgPool, Dodo
from gistkit.compress.methods.in_place import InPlace
from gistkit.hf import attach
from gistkit_lab.studies.facts.signs import KINDS, kinds, measure_signs
from gistkit_lab.studies.facts.study import Arm, Recipe, build_compressor
from gistkit_lab.studies.fitting import Carried, exclusively
from gistkit_lab.studies.pairs.runs import fit, groups
from gistkit_lab.studies.pairs.runs import measure as measure_answers
from gistkit_lab.studies.pairs.study import fresh_model


@dataclass
class Run:
    """The results of one selection and seed.

    `held_out` and `test` hold figures of the trained model: "loss" in nats an answer, "exact", the share of right
    answers, and "kept", the share of values that are nuggets. `curve` holds (step, loss, exact) over held-out contexts.
    `signs` of a staged run holds {step: {ratio: what `measure_signs` finds before it}} of the first step, and of the
    scorer's first after random nuggets.
    """

    selection: str
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0
    signs: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)


def train(
    recipe: Recipe, arm: Arm, seed: int, out: Path, *, device: str = "cpu", resume: bool = False, bar: Any
) -> Run:
    """Trains and measures one arm and seed; `out` gets its state at every evaluation, from which it can resume.

    `out` also gets the decoder of the seed, which its arms share.
    """
    model = _base(recipe, seed, out, device, bar)
    torch.manual_seed(seed)
    compressor = build_compressor(recipe, arm, model).to(device)
    run = Run(arm.selection, seed, parameters=sum(value.numel() for _, value in compressor.trainable()))

    def look(step: int) -> None:
        if arm.selection == "learned" and isinstance(compressor, Dodo) and step in (0, recipe.random_steps):
            run.signs[str(step)] = {str(ratio): measure_signs(compressor, recipe, ratio) for ratio in recipe.ratios}

    progress = fit(
        recipe, compressor, arm.name, seed, out, device, resume, bar, part=1, stages=recipe.stages(arm.selection),
        before=look, carried=Carried(lambda: run.signs, lambda signs: setattr(run, "signs", signs)),
    )  # fmt: skip
    run.curve, run.seconds = progress.curve, progress.seconds
    for split, figures in (("held_out", run.held_out), ("test", run.test)):
        figures |= measure(compressor, recipe, split)
    return run


@torch.no_grad()
def measure(compressor: InPlace, recipe: Recipe, split: str) -> dict[str, float]:
    """{"loss", "exact", "kept"} of a trained model over the contexts of a split."""
    with attach(compressor.model):
        figures = measure_answers(compressor, recipe, split, recipe.test_contexts)
        if not isinstance(compressor, Dodo):
            return figures | {"kept": 1.0}
        kept = count = 0
        for pairs in groups(recipe, split, recipe.test_contexts):
            contexts = pairs.contexts.to(compressor.device)
            rows = compressor.with_bos(compressor.contexts(contexts))
            index = compressor.nuggets(rows, compressor.whole_scores(rows)).index
            is_value = kinds(contexts, recipe) == KINDS.index("value")
            kept += int(is_value.gather(1, index - 1).sum())
            count += int(is_value.sum())
    return figures | {"kept": kept / count}


def _base(recipe: Recipe, seed: int, out: Path, device: str, bar: Any) -> PreTrainedModel:
    """The decoder that the arms of a seed start from: it looks values up, first among pairs alone."""
    model = fresh_model(recipe, seed)
    full = AvgPool(model, ratio=1, lora=None, losses=("qa",)).to(device)
    alone = replace(
        recipe, steps=recipe.pairs_steps, learning_rate=recipe.pairs_rate, eval_every=recipe.pairs_steps, length=0,
        fewest=recipe.pairs, most=recipe.pairs,
    )  # fmt: skip
    among = replace(recipe, steps=recipe.base_steps, learning_rate=recipe.base_rate, eval_every=recipe.base_steps)
    with exclusively(out / f"base-{seed}.lock"):
        fit(alone, full, "pairs", seed, out, device, True, bar, part=0)
        fit(among, full, "base", seed, out, device, True, bar, part=2)
    return model
