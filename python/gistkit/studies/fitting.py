"""The training loop that the studies share: a schedule, evaluations at intervals, and a state to resume from."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.train import checkpoint
from gistkit.train.recipe import set_learning_rate, warmed_up


@dataclass(frozen=True)
class StudyRecipe:
    """The schedule of a run, whatever its model and its data."""

    steps: int = 450
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 25


@dataclass
class Progress:
    """The evaluations of a training, (step, figure, ...) each, and its seconds without them."""

    curve: list[tuple[Any, ...]]
    seconds: float


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Inside, no other process is in this block; `path` is a lock file. For what several runs share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fit(
    recipe: StudyRecipe,
    compressor: Compressor,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    evaluate: Callable[[], tuple[float, ...]],
    state: Path,
    identity: dict[str, Any],
    *,
    resume: bool,
    bar: Any,
) -> Progress:
    """Trains a compressor to the recipe's last step, with a constant learning rate after the warm-up.

    Args:
        compressor: trained in place; its model is attached meanwhile.
        optimizer: from `adamw`.
        loss, evaluate, state, identity, resume, bar: as in `optimise`.
    """
    parameters = list(compressor.trainable())
    with attach(compressor.model):
        return optimise(
            recipe, parameters, optimizer, loss, evaluate, state, identity,
            learning_rate=lambda step: warmed_up(recipe.learning_rate, step, recipe.warmup),
            clips=[([parameter for _, parameter in parameters], recipe.clip)],
            resume=resume, bar=bar,
        )  # fmt: skip


def optimise(
    recipe: StudyRecipe,
    parameters: Sequence[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    evaluate: Callable[[], tuple[float, ...]],
    state: Path,
    identity: dict[str, Any],
    *,
    learning_rate: Callable[[int], float],
    clips: Sequence[tuple[Sequence[nn.Parameter], float]],
    resume: bool,
    bar: Any,
) -> Progress:
    """Trains to the recipe's last step.

    Args:
        parameters: the trained parameters, by name.
        optimizer: of these, its groups with a "factor" of the learning rate, as `adamw` makes them.
        loss: of step 0, 1, ...; the same at every call.
        evaluate: figures of the current model, the first of them its held-out loss; called before the first step,
            every `eval_every` steps and after the last.
        state: a file, written at every evaluation.
        identity: JSON values that decide the run; a state of another one is refused.
        learning_rate: of step 0, 1, ...
        clips: parameters whose gradients are clipped together, with the norm each.
        resume: go on from `state`, if it is there.
        bar: a tqdm progress bar.
    """
    training, first = Progress([], 0.0), 0
    if resume and state.exists():
        saved = checkpoint.load(state, identity, parameters, optimizer)
        first = saved["step"]
        training = Progress([(int(step), *figures) for step, *figures in saved["curve"]], saved["seconds"])
    bar.reset(total=recipe.steps)
    bar.update(first)

    clock = time.perf_counter()
    for step in range(first, recipe.steps + 1):
        last = step == recipe.steps
        is_due = not training.curve or training.curve[-1][0] < step
        if is_due and (last or step % recipe.eval_every == 0):
            training.seconds += time.perf_counter() - clock
            training.curve.append((step, *evaluate()))
            bar.set_postfix_str(f"held-out loss {training.curve[-1][1]:.3f}")
            progress = {"step": step, "seconds": training.seconds, "curve": training.curve}
            checkpoint.save(state, identity, progress, parameters, optimizer)
            clock = time.perf_counter()
        if last:
            break
        set_learning_rate(optimizer, learning_rate(step))
        optimizer.zero_grad()
        loss(step).backward()
        for clipped, limit in clips:
            torch.nn.utils.clip_grad_norm_(clipped, limit)
        optimizer.step()
        bar.update()
    return training
