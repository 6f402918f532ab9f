"""The training loop that the studies share: a schedule, evaluations at intervals, and a state to resume from."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gistkit.common.processes import Processes, launched
from gistkit.common.signals import Interrupted, held
from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.train.recipe import set_learning_rate, warmed_up
from gistkit_lab.studies import states as checkpoint

_ALONE = Processes()


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


@dataclass(frozen=True)
class FallingRecipe(StudyRecipe):
    """A schedule whose learning rate is constant after the warm-up, and falls to 0 in the share `decay` at the end."""

    decay: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay: expected a share from 0 to 1, got {self.decay}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup, 1), falling)


@dataclass
class Progress:
    """The evaluations of a training, (step, figure, ...) each, and its seconds without them.

    `times` are the seconds up to each evaluation: of the processor where one thread trains on a CPU, so that other work
    on the machine does not count, and otherwise by the clock. nan where a state of an earlier release has none.
    """

    curve: list[tuple[Any, ...]]
    seconds: float
    times: list[float] = field(default_factory=list)


class Carried(NamedTuple):
    """What a run has besides parameters and step: how a state gets it, as JSON, and gives it back."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def saved_states(state: Path) -> list[Path]:
    """The states of a run that exist, oldest first: `state`, and the one before it."""
    return [path for path in (_before(state), state) if path.exists()]


def save_state(state: Path, *content: Any) -> None:
    """`checkpoint.save`, which keeps the state before: a damaged one gives way to it."""
    new = state.with_name(f"{state.name}.new")
    # First the new one is whole on the disk: the one before may be the only good one.
    checkpoint.save(new, *content)
    if state.exists():
        os.replace(state, _before(state))
    os.replace(new, state)


def remove_states(state: Path) -> None:
    """Removes a run's states."""
    for path in (*saved_states(state), state.with_name(f"{state.name}.new")):
        path.unlink(missing_ok=True)


def _before(state: Path) -> Path:
    return state.with_name(f"{state.name}.before")


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Inside, no other process is in this block; `path` is a lock file. For what several runs share.

    Of the processes of one launch the first has the lock for all; the others do not wait for it.
    """
    if not launched().is_first:
        yield
        return
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
    carried: Carried | None = None,
) -> Progress:
    """Trains a compressor to the recipe's last step, with a constant learning rate after the warm-up.

    Args:
        compressor: trained in place; its model is attached meanwhile.
        optimizer: from `adamw`.
        loss, evaluate, state, identity, resume, bar, carried: as in `optimise`.
    """
    parameters = list(compressor.trainable())
    with attach(compressor.model):
        return optimise(
            recipe, parameters, optimizer, loss, evaluate, state, identity,
            learning_rate=lambda step: warmed_up(recipe.learning_rate, step, recipe.warmup),
            clips=[([parameter for _, parameter in parameters], recipe.clip)],
            resume=resume, bar=bar, carried=carried,
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
    carried: Carried | None = None,
    processes: Processes = _ALONE,
) -> Progress:
    """Trains to the recipe's last step. SIGINT and SIGTERM end it after a step, with a state; a second one at once.

    Args:
        parameters: the trained parameters, by name.
        optimizer: of these, its groups with a "factor" of the learning rate, as `adamw` makes them.
        loss: of step 0, 1, ...; the same at every call.
        evaluate: figures of the current model, the first of them its held-out loss; called before the first step,
            every `eval_every` steps and after the last.
        state: a file, written at every evaluation; the one before is kept beside it.
        identity: JSON values that decide the run; a state of another one is refused.
        learning_rate: of step 0, 1, ...
        clips: parameters whose gradients are clipped together, with the norm each.
        resume: go on from `state`, if it is there; otherwise it is removed first.
        bar: a tqdm progress bar.
        carried: what loss and evaluations change besides the parameters, and what a resumed run gets back.
        processes: that train together, each with the loss of its part of a step's batch, whose mean is the step's.

    Raises:
        Interrupted: after a signal, when the state is saved.
    """
    training, first, spent = Progress([], 0.0), 0, 0.0
    device = parameters[0][1].device
    if not resume and processes.is_first:
        remove_states(state)
    processes.gathered(None)
    if states := saved_states(state):
        saved = checkpoint.load_last(states, identity, parameters, optimizer)
        first = saved["step"]
        training = Progress([(int(step), *figures) for step, *figures in saved["curve"]], saved["seconds"])
        # States of earlier releases have none of these.
        training.times = saved.get("times", [math.nan] * len(training.curve))
        spent = saved.get("spent", math.nan)
        if carried is not None and saved.get("carried") is not None:
            carried.set(saved["carried"])
        # Earlier releases save those of one process, or none.
        randoms = saved.get("randoms", [saved["random"]] if "random" in saved else [])
        if len(randoms) == processes.count:
            _set_random(randoms[processes.index], device)

    def save(step: int) -> None:
        progress = {
            "step": step, "seconds": training.seconds, "curve": training.curve, "times": training.times, "spent": spent,
            "randoms": processes.gathered(_random(device)),
        }  # fmt: skip
        if carried is not None:
            progress["carried"] = carried.get()
        if processes.is_first:
            save_state(state, identity, progress, parameters, optimizer)

    bar.reset(total=recipe.steps)
    bar.update(first)

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    work_clock = time.process_time if alone else time.perf_counter
    with held() as signals:
        clock, work = time.perf_counter(), work_clock()
        for step in range(first, recipe.steps + 1):
            last = step == recipe.steps
            is_due = not training.curve or training.curve[-1][0] < step
            is_due = is_due and (last or step % recipe.eval_every == 0)
            # Once: a signal that comes later ends the next step.
            number = max(processes.gathered(signals.number))
            if is_due or number:
                training.seconds += time.perf_counter() - clock
                spent += work_clock() - work
                # An interrupted run is measured when it goes on.
                if not number:
                    training.times.append(spent)
                    training.curve.append((step, *evaluate()))
                    bar.set_postfix_str(f"held-out loss {training.curve[-1][1]:.3f}")
                save(step)
                clock, work = time.perf_counter(), work_clock()
            if number:
                raise Interrupted(number, f"interrupted after step {step} of {recipe.steps}; {state} is saved")
            if last:
                break
            set_learning_rate(optimizer, learning_rate(step))
            optimizer.zero_grad()
            loss(step).backward()
            processes.average([parameter.grad for _, parameter in parameters if parameter.grad is not None])
            for clipped, limit in clips:
                torch.nn.utils.clip_grad_norm_(clipped, limit)
            optimizer.step()
            bar.update()
    return training


def _random(device: torch.device) -> list[str]:
    """The state of the random numbers of a CPU and of a GPU, if that is the device."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [state.numpy().tobytes().hex() for state in states]


def _set_random(states: Sequence[str], device: torch.device) -> None:
    tensors = [torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states]
    torch.set_rng_state(tensors[0])
    if device.type == "cuda" and len(tensors) > 1:
        torch.cuda.set_rng_state(tensors[1], device)
