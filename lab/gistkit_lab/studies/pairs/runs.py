"""Runs of the study `pairs`: trains and measures one arm and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.compress.memory import Memory
from gistkit.compress.methods.in_place import InPlace
from gistkit.hf import attach
from gistkit.layouts import Plan
from gistkit.train.recipe import adamw
from gistkit.train.stages import Stage, selecting_at
from gistkit_lab.studies.fitting import Carried, Progress, exclusively
from gistkit_lab.studies.fitting import fit as fit_compressor
from gistkit_lab.studies.in_place.runs import Run
from gistkit_lab.studies.in_place.study import Arm, arm_compressor
from gistkit_lab.studies.pairs.study import Pairs, Recipe, draw, fresh_model

# Contexts of a group, all of one length.
GROUP = 32


def train(
    recipe: Recipe, arm: Arm, seed: int, out: Path, *, device: str = "cpu", resume: bool = False, bar: Any
) -> Run:
    """Trains and measures one arm and seed; `out` gets its state at every evaluation, from which it can resume.

    `out` also gets the decoder of the seed, which its arms share.
    """
    model = fresh_model(recipe, seed)
    with exclusively(out / f"base-{seed}.lock"):
        schedule = replace(
            recipe, steps=recipe.base_steps, learning_rate=recipe.base_rate, eval_every=recipe.base_steps
        )
        base = arm_compressor(Arm("full"), model, lora=None).to(device)
        fit(schedule, base, "base", seed, out, device, True, bar, part=0)
    torch.manual_seed(seed)
    compressor = arm_compressor(arm, model, lora=None).to(device)
    run = Run(arm.method, arm.ratio, seed, parameters=sum(value.numel() for _, value in compressor.trainable()))
    progress = fit(recipe, compressor, arm.name, seed, out, device, resume, bar, part=1)
    run.curve, run.seconds = progress.curve, progress.seconds
    with attach(compressor.model):
        for split in ("held_out", "test"):
            getattr(run, split)["all"] = measure(compressor, recipe, split, recipe.test_contexts)
    return run


def logits(compressor: InPlace, pairs: Pairs, recipe: Recipe, memory: Memory | None = None) -> Tensor:
    """[B, n, values], those of the values where each key is asked for, behind a memory; None: the context's.

    All keys are asked at once. Where each is `alone` none knows of the others: it has the position id that follows the
    context, and sees the memory and itself. Otherwise the keys are a text without values: a value beside its key would
    tell what the others are not.
    """
    if memory is None:
        memory, _, _ = compressor.compress_rows(compressor.contexts(pairs.contexts))
    plan = None
    if recipe.alone:
        plan = _each_alone(memory.num_tokens, pairs.keys.shape[1], memory.starts[0]).to(compressor.device)
    # The first state is the one before the first key.
    states = compressor.read(memory, "qa", compressor.rows("keys", pairs.keys), plan)[:, 1:]
    return compressor.logits(states)[..., recipe.keys : recipe.bos]


def _each_alone(memory: int, questions: int, start: int) -> Plan:
    own = torch.arange(memory, memory + questions, dtype=torch.int32)
    spans = torch.stack([torch.tensor([[0, memory]], dtype=torch.int32).expand(questions, 2),
                         torch.stack([own, own + 1], -1)], 1)  # fmt: skip
    return Plan.from_spans(spans, memory + questions, torch.full((questions,), start))


@torch.no_grad()
def measure(compressor: InPlace, recipe: Recipe, split: str, contexts: int) -> dict[str, float]:
    """{"loss", "exact"} over contexts of a split: nats an answer, and the share of right answers."""
    loss = right = count = 0.0
    for pairs in groups(recipe, split, contexts):
        pairs = _on(pairs, compressor.device)
        scores = logits(compressor, pairs, recipe)
        loss += float(cross_entropy(scores.flatten(0, 1), pairs.answers.flatten(), reduction="sum"))
        right += float((scores.argmax(-1) == pairs.answers).sum())
        count += pairs.answers.numel()
    return {"loss": loss / count, "exact": right / count}


def groups(recipe: Recipe, split: str, contexts: int) -> Iterator[Pairs]:
    """The contexts of a split, in groups of one length."""
    for group, start in enumerate(range(0, contexts, GROUP)):
        yield draw(recipe, split, group, rows=min(GROUP, contexts - start))


def _on(pairs: Pairs, device: torch.device | str) -> Pairs:
    return Pairs(*(tensor.to(device) for tensor in pairs))


def fit(
    recipe: Recipe, compressor: InPlace, name: str, seed: int, out: Path, device: str, resume: bool, bar: Any, *,
    part: int, stages: Sequence[Stage] = (), before: Callable[[int], None] | None = None,
    carried: Carried | None = None,
) -> Progress:  # fmt: skip
    """Trains a compressor on the answers of a recipe's contexts; `out`/`name`-`seed` has its checkpoints.

    Args:
        part: of the training contexts, which differ from part to part.
        stages: see `gistkit.train.stages`.
        before: called before the loss of step 0, 1, ...
        carried: as in `optimise`.
    """
    parameter_groups = compressor.parameter_groups(recipe.learning_rate, memory_factor=recipe.memory_factor)

    def loss(step: int) -> Tensor:
        if before is not None:
            before(step)
        pairs = _on(draw(recipe, "train", seed, part, step, rows=recipe.batch), device)
        with selecting_at(compressor, stages, step):
            return cross_entropy(logits(compressor, pairs, recipe).flatten(0, 1), pairs.answers.flatten())

    figures: Callable[[], tuple[float, ...]] = lambda: tuple(  # noqa: E731
        measure(compressor, recipe, "held_out", recipe.eval_contexts).values()
    )
    # The measurements at the end do not determine a run.
    decides = {key: value for key, value in asdict(recipe).items() if key != "test_contexts"}
    return fit_compressor(
        recipe, compressor, loss, figures, out / f"{name}-{seed}", {"recipe": decides, "arm": name, "seed": seed},
        optimizer=adamw(parameter_groups, recipe.learning_rate, recipe.weight_decay), resume=resume, bar=bar,
        carried=carried,
    )  # fmt: skip
