"""The training loop that the studies share: a schedule, evaluations at intervals, and a state to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.train import checkpoint
from gistkit.train.recipe import set_learning_rate, warmed_up


class Named(Protocol):
    """What a run is of."""

    @property
    def name(self) -> str: ...


Arm = TypeVar("Arm", bound=Named)
Run = TypeVar("Run")


@dataclass(frozen=True)
class Training:
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
    """What a training gave: the evaluations, (step, figure, ...) each, and its seconds without them."""

    curve: list[tuple[Any, ...]]
    seconds: float


def each_run(
    train: Callable[[Arm, int, Any], Run], arms: Sequence[Arm], seeds: Sequence[int], out: Path
) -> Iterator[Run]:
    """Yields what `train` gives of (arm, seed, progress bar), for every arm of each seed.

    Args:
        train: of an arm, which has a `name`.
        out: a folder that is there before the first run.
    """
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for arm in arms:
            with tqdm(desc=f"{arm.name} seed {seed}", unit="step", dynamic_ncols=True) as bar:
                yield train(arm, seed, bar)


def fit(
    recipe: Training,
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
    """Trains to the recipe's last step.

    Args:
        compressor: trained in place; its model is attached meanwhile.
        optimizer: from `adamw`.
        loss: of step 0, 1, ...; the same at every call.
        evaluate: figures of the compressor as it is, the first of them its held-out loss; called before the first
            step, every `eval_every` steps and after the last.
        state: a file, written at every evaluation.
        identity: JSON values that decide the run; a state of another one is refused.
        resume: go on from `state`, if it is there.
        bar: a tqdm progress bar.
    """
    parameters = [parameter for _, parameter in compressor.trainable()]
    done, first = Progress([], 0.0), 0
    if resume and state.exists():
        saved = checkpoint.load(state, identity, compressor.trainable(), optimizer)
        first = saved["step"]
        done = Progress([(int(step), *figures) for step, *figures in saved["curve"]], saved["seconds"])
    bar.reset(total=recipe.steps)
    bar.update(first)

    clock = time.perf_counter()
    with attach(compressor.model):
        for step in range(first, recipe.steps + 1):
            last = step == recipe.steps
            fresh = not done.curve or done.curve[-1][0] < step
            if fresh and (last or step % recipe.eval_every == 0):
                done.seconds += time.perf_counter() - clock
                done.curve.append((step, *evaluate()))
                bar.set_postfix_str(f"held-out loss {done.curve[-1][1]:.3f}")
                progress = {"step": step, "seconds": done.seconds, "curve": done.curve}
                checkpoint.save(state, identity, progress, compressor.trainable(), optimizer)
                clock = time.perf_counter()
            if last:
                break
            set_learning_rate(optimizer, warmed_up(recipe.learning_rate, step, recipe.warmup))
            optimizer.zero_grad()
            loss(step).backward()
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
            optimizer.step()
            bar.update()
    return done
