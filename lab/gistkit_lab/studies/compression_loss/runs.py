"""Runs of the study `compression-loss`: pretrains under one setting and seed, fine-tunes copies, and measures all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.train.data import Corpus
from gistkit_lab.studies import answering
from gistkit_lab.studies.compression_loss.study import TASKS, Recipe, build_compressor
from gistkit_lab.studies.fitting import fit
from gistkit_lab.studies.needles import Needles
from gistkit_lab.studies.reconstruction import evaluate, held_out_losses

PRETRAINING = "pretraining"
Loss = Callable[[Compressor, int], Tensor]


@dataclass
class Run:
    """The results of one setting and seed, by stage: "pretraining", and the fine-tunings "ae" and "qa" of its copies.

    `curves` hold (step, loss, share) over held-out text: of reconstruction nats a byte and right bytes, in the stage
    "qa" nats an answer's byte and exact answers. `seconds` are those of training at each of these evaluations; those of
    fine-tuning begin where pretraining ends. `held_out` and `test` hold the figures at the end of each stage: "loss"
    and "share", and of pretraining also the losses it trained, by name. The test split is read once.
    """

    setting: str
    seed: int
    curves: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    parameters: int = 0


class Texts:
    """What a seed trains on and is measured on.

    Args:
        corpus: bytes, whose two held-out splits measure (`Corpus.splits`).

    Raises:
        ValueError: if the text is too short for one chunk and its continuation in each part.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, seed: int, device: str) -> None:
        self.recipe, self.corpus, self.seed, self.device = recipe, corpus, seed, device
        length = recipe.chunk + recipe.continuation
        self.chunks: dict[str, Tensor] = {}
        self.passages: dict[str, Tensor] = {}
        for name, part in corpus.splits().items():
            split = replace(corpus, held_out=part)
            split.check(length)
            self.chunks[name] = split.chunks(recipe.chunk, count=recipe.final_chunks).to(device)
            self.passages[name] = split.chunks(length, count=recipe.final_chunks).to(device)
        self.questions = Needles(
            corpus, None, recipe.batch, recipe.chunk, recipe.chunk,
            lines=0, cue=recipe.cue, answer=recipe.answer, seed=seed,
        )  # fmt: skip

    def loss(self, stage: str) -> Loss:
        """The training loss of a stage at step 0, 1, ..."""
        recipe = self.recipe
        if stage == "qa":
            return lambda compressor, step: compressor(**self._to_device(self.questions(step)))["loss"]
        continuation = recipe.continuation if stage == PRETRAINING else 0
        length = recipe.chunk + continuation
        # All at once, so that a resumed run uses those of its step; fine-tuning has texts of its own.
        generator = torch.Generator().manual_seed((1000 if continuation else 2000) + self.seed)
        steps = recipe.steps if stage == PRETRAINING else recipe.tuning_steps
        starts = torch.randint(0, self.corpus.train.numel() - length + 1, (steps, recipe.batch), generator=generator)

        def loss(compressor: Compressor, step: int) -> Tensor:
            rows = self.corpus.passages(starts[step], length).to(self.device)
            after = {"continuation_ids": rows[:, recipe.chunk :]} if continuation else {}
            total: Tensor = compressor(rows[:, : recipe.chunk], **after)["loss"]
            return total

        return loss

    def figures(self, stage: str, compressor: Compressor) -> tuple[float, float]:
        """(loss, share) during a stage, of the first held-out texts or questions; the model is attached."""
        if stage == "qa":
            return self._answers(compressor, "held_out", self.recipe.eval_questions)
        return evaluate(compressor, self.chunks["held_out"][: self.recipe.eval_chunks])

    def final(self, stage: str, compressor: Compressor, split: str) -> dict[str, float]:
        """The figures at the end of a stage, of "held_out" or "test"; the model is attached."""
        if stage == "qa":
            loss, share = self._answers(compressor, split, self.recipe.final_questions)
        else:
            loss, share = evaluate(compressor, self.chunks[split])
        trained = held_out_losses(compressor, self.passages[split]) if stage == PRETRAINING else {}
        return {name: value for name, value in trained.items() if name in ("lm", "compression")} | {
            "loss": loss, "share": share
        }  # fmt: skip

    def _answers(self, compressor: Compressor, split: str, count: int) -> tuple[float, float]:
        found = answering.evaluate(compressor, self.questions, split, count, self.device)["all"]
        return found["loss"], found["exact"]

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


def train(
    recipe: Recipe,
    setting: str,
    seed: int,
    corpus: Corpus,
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    bar: Any,
) -> Run:
    """Pretrains one setting and seed, and fine-tunes copies of it on each of `TASKS`.

    `out` gets a state of each stage at every evaluation, from which it can resume.
    """
    texts, run = Texts(recipe, corpus, seed, device), Run(setting, seed)
    pretrained = build_compressor(recipe, setting, seed).to(device)
    run.parameters = sum(parameter.numel() for _, parameter in pretrained.trainable())
    states = {stage: out / f"{setting}-{seed}{suffix}" for stage, suffix in
              ((PRETRAINING, ""), *((task, f"-{task}") for task in TASKS))}  # fmt: skip
    if not resume:
        # Those of all stages: a later stage must not go on from an earlier run.
        for state in states.values():
            shutil.rmtree(state, ignore_errors=True)
    _run_stage(run, PRETRAINING, pretrained, recipe, texts, states[PRETRAINING], bar)
    for task in TASKS:
        compressor = build_compressor(recipe, setting, seed).to(device)
        compressor.load_state_dict(pretrained.state_dict())
        compressor.set_losses([task])
        _run_stage(run, task, compressor, recipe.tuning, texts, states[task], bar)
    return run


def _run_stage(
    run: Run, stage: str, compressor: Compressor, schedule: Recipe, texts: Texts, state: Path, bar: Any
) -> None:
    recipe, loss = texts.recipe, texts.loss(stage)
    # The measurements at the end do not determine a run.
    decides = {key: value for key, value in asdict(recipe).items() if key not in ("final_chunks", "final_questions")}
    identity = {"recipe": decides, "corpus": texts.corpus.digest, "arm": run.setting, "seed": run.seed, "stage": stage}
    progress = fit(
        schedule, compressor, lambda step: loss(compressor, step),
        lambda: texts.figures(stage, compressor), state, identity, resume=True, bar=bar,
    )  # fmt: skip
    before = run.seconds[PRETRAINING][-1] if stage in TASKS else 0.0
    run.curves[stage] = progress.curve
    run.seconds[stage] = [before + seconds for seconds in progress.times]
    with attach(compressor.model):
        run.held_out[stage] = texts.final(stage, compressor, "held_out")
        run.test[stage] = texts.final(stage, compressor, "test")
