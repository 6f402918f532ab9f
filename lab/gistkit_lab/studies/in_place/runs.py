"""Runs of the study `in-place`: trains and measures one arm and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from gistkit.compress import GistPool, start_as_means
from gistkit.compress.methods.in_place import InPlace
from gistkit.hf import attach
from gistkit.train import checkpoints
from gistkit.train.batches import Batch
from gistkit.train.data import Corpus
from gistkit.train.questions import Question
from gistkit.train.recipe import adamw
from gistkit_lab.studies.answering import evaluate
from gistkit_lab.studies.fitting import Progress, exclusively, fit
from gistkit_lab.studies.in_place.study import Arm, Recipe, build_compressor, fresh_model
from gistkit_lab.studies.models import tokenizer
from gistkit_lab.studies.needles import Needles, as_batch


@dataclass
class Run:
    """The results of one arm and seed; losses in nats an answer token, `exact` the share of answers without an error.

    `held_out` and `test` hold {"loss", "exact"} of the trained model for each kind of question, and their mean as
    "all"; the test split is read once, at the end. `curve` holds (step, loss, exact) over held-out questions, the mean
    of the kinds. `examples` are held-out questions with the answers given.
    """

    method: str
    ratio: int
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


def questions(recipe: Recipe, corpus: Corpus, seed: int) -> Needles:
    """The questions of a seed; the held-out ones are the same for all."""
    return Needles(
        corpus, tokenizer(recipe), recipe.batch, recipe.min_length, recipe.max_length,
        lines=recipe.lines, cue=recipe.cue, answer=recipe.answer, seed=seed,
    )  # fmt: skip


@torch.no_grad()
def answers(compressor: InPlace, group: Sequence[Question], device: str = "cpu") -> list[tuple[int, ...]]:
    """Greedy answers, as long as the right ones."""
    memory = compressor.encode(as_batch(group)["input_ids"].to(device))
    longest = max(len(question.answer) for question in group)
    prompts = [list(question.question) for question in group]
    generated = compressor.generate(memory, prompts, max_new_tokens=longest, stop_tokens=())
    return [tuple(row[: len(question.answer)]) for row, question in zip(generated.tolist(), group, strict=True)]


def train(
    recipe: Recipe,
    arm: Arm,
    seed: int,
    corpus: Corpus,
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    bar: Any,
) -> Run:
    """Trains and measures one arm and seed; `out` gets its state at every evaluation, from which it can resume.

    With `base_steps`, `out` also gets the base model of the seed, which the seed's other runs reuse.
    """
    data = questions(recipe, corpus, seed)
    model = _base(recipe, seed, data, out, device, bar)
    torch.manual_seed(seed)
    compressor = build_compressor(recipe, arm, model).to(device)
    state = out / f"{arm.name}-{seed}"
    if arm.method == "gistpool-means" and not (resume and checkpoints.find(state)):
        start(recipe, compressor, data)
    run = Run(arm.method, arm.ratio, seed, parameters=sum(p.numel() for _, p in compressor.trainable()))
    progress = _fit(recipe, compressor, arm.name, seed, data, state, device, resume, bar)
    run.curve, run.seconds = progress.curve, progress.seconds
    compressor.eval()
    with attach(compressor.model):
        run.held_out = evaluate(compressor, data, "held_out", recipe.final_questions, device)
        run.test = evaluate(compressor, data, "test", recipe.final_questions, device)
        group = data.groups("held_out", 4)[0]
        for question, answer in zip(group, answers(compressor, group, device), strict=True):
            run.examples.append(
                {"question": _text(recipe, question.question), "answer": _text(recipe, question.answer),
                 "given": _text(recipe, answer)}
            )  # fmt: skip
    return run


def start(recipe: Recipe, compressor: InPlace, data: Needles) -> list[float]:
    """Starts a GistPool's gists as means over contexts of the first steps; see `start_as_means`."""
    contexts: list[list[int]] = []
    while sum(len(context) for context in contexts) < recipe.start_gists * compressor.chunk:
        contexts += data(len(contexts) // recipe.batch)["input_ids"].tolist()
    return start_as_means(cast(GistPool, compressor), contexts)


def memory_factor(recipe: Recipe, compressor: InPlace) -> float:
    """The learning rate of the memory tokens' own parameters, as a factor of the recipe's."""
    copies_beside_lora = compressor.copies is not None and compressor.adapters is not None
    return recipe.copy_factor if copies_beside_lora else recipe.memory_factor


def _fit(
    recipe: Recipe,
    compressor: InPlace,
    name: str,
    seed: int,
    data: Needles,
    state: Path,
    device: str,
    resume: bool,
    bar: Any,
    base: bool = False,
) -> Progress:
    """Trains on the answers; the base model of the arms also as a language model, and on repetitions."""
    groups = compressor.parameter_groups(recipe.learning_rate, memory_factor=memory_factor(recipe, compressor))
    optimizer = adamw(groups, recipe.learning_rate, recipe.weight_decay)

    def loss(step: int) -> torch.Tensor:
        compressor.train()
        batch = {name: tensor.to(device) for name, tensor in data(step).items()}
        total = compressor(**batch)["loss"]
        if base:
            again = torch.Generator().manual_seed(100_003 * (seed + 1) + step)
            total = total + language_loss(compressor, batch) + repetition_loss(compressor, batch, again)
        return total

    def figures() -> tuple[float, float]:
        compressor.eval()
        held_out = evaluate(compressor, data, "held_out", recipe.eval_questions, device)["all"]
        return held_out["loss"], held_out["exact"]

    # Each run has its own seed, so that dropout, where a model has it, is the same for all arms.
    torch.manual_seed(seed)
    identity = {"recipe": asdict(recipe), "questions": data.identity, "arm": name, "seed": seed}
    if base:
        identity["losses"] = ["answers", "text", "repetition"]
    return fit(recipe, compressor, loss, figures, state, identity, resume=resume, bar=bar, optimizer=optimizer)


def _base(recipe: Recipe, seed: int, data: Needles, out: Path, device: str, bar: Any) -> PreTrainedModel:
    """The model that the arms of a seed start from; each gets its own copy."""
    model = fresh_model(recipe, seed)
    if recipe.base_steps:
        schedule = replace(recipe, steps=recipe.base_steps, eval_every=recipe.base_steps, base_steps=0)
        compressor = build_compressor(schedule, Arm("full"), model).to(device)
        state = out / f"base-{seed}"
        with exclusively(state.with_suffix(".lock")):
            _fit(schedule, compressor, "base", seed, data, state, device, True, bar, True)
    return model


def language_loss(compressor: InPlace, batch: Batch) -> torch.Tensor:
    """Mean loss of every token of [BOS][context][question][answer]; questions of one length, so that none is padded."""
    bos = torch.full_like(batch["input_ids"][:, :1], compressor.bos_token)
    input_ids = torch.cat([bos, batch["input_ids"], batch["question_ids"], batch["answer_ids"]], 1)
    logits = compressor.model(input_ids=input_ids[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def repetition_loss(compressor: InPlace, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """Mean loss of random bytes that occur in the text a second time, in texts like the contexts in number and length.

    Real text can be guessed without looking back; from random bytes so small a model soon learns to look things up.
    """
    device, shape = batch["input_ids"].device, batch["input_ids"].shape
    random_ids = torch.randint(32, 127, shape, generator=generator).to(device)
    begin = int(torch.randint(shape[1] // 2, (), generator=generator))
    bos = torch.full_like(random_ids[:, :1], compressor.bos_token)
    input_ids = torch.cat([bos, random_ids, random_ids[:, begin:]], 1)
    # Which byte comes again first cannot be known.
    logits = compressor.model(input_ids=input_ids[:, :-1]).logits[:, 1 + shape[1] :]
    return cross_entropy(logits.flatten(0, 1), input_ids[:, 2 + shape[1] :].flatten())


def _text(recipe: Recipe, ids: Sequence[int]) -> str:
    recipe_tokenizer = tokenizer(recipe)
    if recipe_tokenizer is None:
        return bytes(min(token, 255) for token in ids).decode("utf-8", "replace")
    return recipe_tokenizer.decode(list(ids))
