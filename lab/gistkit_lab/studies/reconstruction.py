"""One training run of a study: a compressor under one layout and seed, measured as it learns to reconstruct."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.inspect import AttentionRecorder, measure_tracking
from gistkit.train.data import Corpus
from gistkit_lab.studies.fitting import Carried, Session, StudyRecipe

GOAL = 1.0


@dataclass(frozen=True)
class ReconstructionRecipe(StudyRecipe):
    """What determines a run besides its model: chunk and ratio in tokens, the optimizer, and the evaluations.

    `continuation`: number of tokens after each chunk, for the lm loss.
    """

    chunk: int = 80
    ratio: int = 5
    continuation: int = 0
    eval_chunks: int = 64
    final_chunks: int = 1000

    def context_at(self, step: int) -> int:
        """Tokens of the contexts of step 0, 1, ..., at most `chunk`."""
        return self.chunk

    def losses_at(self, step: int) -> tuple[str, ...] | None:
        """The losses of step 0, 1, ...; None: the compressor's."""
        return None


Build = Callable[[Any, Any, int], Compressor]


@dataclass
class Run:
    """The results of one layout and seed. Losses are held-out, in nats a token (the demo's tokens are bytes).

    `losses` are the training losses, by name. `curve` holds (step, loss, accuracy) of reconstruction over the recipe's
    `eval_chunks`, cut to the contexts of the step before; `loss` and `accuracy` are those of the trained model over
    `final_chunks`.
    """

    layout: str
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    loss: float = float("nan")
    accuracy: float = float("nan")
    greedy_accuracy: float = float("nan")
    seconds: float = 0.0
    parameters: int = 0
    passage: dict[str, str] = field(default_factory=dict)
    tracking: list[dict[str, float]] = field(default_factory=list)
    attention: list[list[list[float]]] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def steps_to_goal(self) -> int | None:
        """The first evaluated step with a held-out loss of at most 1.0; None if there is none."""
        return next((step for step, loss, _ in self.curve if loss <= GOAL), None)


@torch.no_grad()
def evaluate(compressor: Compressor, chunks: Tensor, *, batch: int = 64) -> tuple[float, float]:
    """Held-out (loss in nats a token, accuracy) of teacher-forced reconstruction."""
    loss = correct = 0.0
    for rows in chunks.split(batch):
        logits = compressor.logits(compressor.decode(compressor.encode(rows), "ae", rows[:, :-1]))
        loss += float(cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="sum"))
        correct += float((logits.argmax(-1) == rows).sum())
    return loss / chunks.numel(), correct / chunks.numel()


def _losses(compressor: Compressor, rows: Tensor, context: int) -> dict[str, Tensor]:
    """The losses of passages [B, context + continuation]."""
    after = rows[:, context:]
    return compressor(rows[:, :context], continuation_ids=after if after.shape[1] else None)


@torch.no_grad()
def held_out_losses(compressor: Compressor, rows: Tensor) -> dict[str, float]:
    """The compressor's losses over passages [n, chunk + continuation], in nats a token, by name."""
    total: dict[str, float] = {}
    for part in rows.split(64):
        for name, value in _losses(compressor, part, compressor.chunk).items():
            total[name] = total.get(name, 0.0) + float(value) * len(part)
    return {name: value / len(rows) for name, value in total.items()}


def train(session: Session, build: Build) -> Run:
    """Trains and measures one layout and seed, of a compressor that `build` makes of a recipe, an arm and a seed."""
    recipe, seed, device, corpus = session.recipe, session.seed, session.device, session.source
    corpus.check(recipe.chunk + recipe.continuation)
    compressor = build(recipe, session.arm, seed).to(device)
    # All at once, so that a resumed run uses those of its step. Shorter contexts have more rows, with as many tokens.
    length = recipe.chunk + recipe.continuation
    end = corpus.train.numel() - length + 1
    rows_of = [recipe.batch * recipe.chunk // recipe.context_at(step) for step in range(recipe.steps)]
    generator = torch.Generator().manual_seed(1000 + seed)
    starts = torch.randint(0, end, (recipe.steps, max(rows_of)), generator=generator)
    chunks = corpus.chunks(recipe.chunk, count=recipe.final_chunks).to(device)
    run = Run(session.name, seed, parameters=sum(parameter.numel() for _, parameter in compressor.trainable()))
    made_with, current = compressor.loss_weights, recipe.context_at(0)

    def set_current(context: int) -> None:
        nonlocal current
        current = context

    def loss(step: int) -> Tensor:
        set_current(recipe.context_at(step))
        compressor.set_losses(recipe.losses_at(step) or made_with)
        passages = corpus.passages(starts[step, : rows_of[step]], current + recipe.continuation)
        return _losses(compressor, passages.to(device), current)["loss"]

    progress = session.fit(
        compressor, loss, lambda: evaluate(compressor, chunks[: recipe.eval_chunks, :current]),
        session.decides(corpus=corpus.digest), carried=Carried(lambda: current, set_current),
    )  # fmt: skip
    run.curve, run.seconds = progress.curve, progress.seconds
    compressor.set_losses(made_with)
    with attach(compressor.model):
        run.loss, run.accuracy = evaluate(compressor, chunks)
        run.losses = held_out_losses(compressor, corpus.chunks(length, count=recipe.final_chunks).to(device))
        _reconstruct(run, compressor, corpus, chunks[: recipe.eval_chunks])
        _track(run, compressor, chunks[: recipe.eval_chunks])
    return run


def _reconstruct(run: Run, compressor: Compressor, corpus: Corpus, chunks: Tensor) -> None:
    """Greedy reconstruction: its accuracy over `chunks`, and one passage to read."""
    memory = compressor.encode(chunks)
    answer = compressor.generate(memory, task="ae", max_new_tokens=chunks.shape[1], stop_tokens=())
    run.greedy_accuracy = float((answer == chunks).float().mean())
    run.passage = {"original": corpus.text(chunks[0]), "reconstructed": corpus.text(answer[0])}


@torch.no_grad()
def memory_attention(compressor: Compressor, chunks: Tensor) -> list[Tensor]:
    """Attention of the memory tokens over contexts of a chunk, int64 [B, L]: for each layer [M, L].

    It is the mean over rows and heads. The compressor's model is attached.
    """
    length = chunks.shape[1]
    # In physical order the memory tokens follow the context.
    with AttentionRecorder(rows=slice(length, None), reduce="mean") as recorder:
        compressor.encode(chunks)
    return [layer_map.weights[:, 0, :, :length].mean(0) for layer_map in recorder.maps]


def _track(run: Run, compressor: Compressor, chunks: Tensor) -> None:
    """Attention of memory tokens over the context, mean over chunks and heads, for each layer."""
    for weights in memory_attention(compressor, chunks):
        run.tracking.append(measure_tracking(weights).as_dict())
        run.attention.append([[round(float(w), 5) for w in row] for row in weights])
