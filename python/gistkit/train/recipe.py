"""Recipe: the schedule of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

# Parameters and their learning rate, as torch's optimizers take them.
Group = Mapping[str, Any]


Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
OptimizerName = Literal["adamw", "adafactor"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run besides data and compressor; the defaults pretrain as in Position IDs Matter.

    Args:
        steps: updates of the weights.
        epochs: in place of steps, passes over the data, a number above 0; see `for_rows`.
        batch: rows of a step over all processes and accumulated passes.
        optimizer: "adamw", or "adafactor", torch's, whose learning rate is relative to a parameter's own size.
        learning_rate: once warmed up, and until it falls.
        schedule: whether the learning rate stays ("constant"), or falls to 0 at the last step along a line ("linear")
            or half a cosine ("cosine"), as transformers' schedules of these names.
        warmup: steps over which the learning rate grows linearly from learning_rate / warmup; 0: none.
        decay: the share of the steps, at their end, in which it falls; 1: all steps behind the warm-up.
        betas: of AdamW.
        eps: of AdamW, what is added to the root of the second moment.
        weight_decay: on parameters with two or more axes alone.
        clip: largest norm of the gradient.
        memory_factor: learning rate of the gists' own parameters, over that of the others (GistPool).
        min_length, max_length: of a passage, context and continuation together, in tokens. Contexts of questions are
            cut to max_length.
        context_share: of a passage, rounded down, that is its context, above 0; 1: it has no continuation.
        patience: evaluations on end without a lower held-out loss after which the run ends; the weights are then those
            of the lowest. None: it goes on to the last step, and the weights are those of that.
        seed: of batches and dropout.
    """

    steps: int = 20_000
    batch: int = 16
    learning_rate: float = 1e-4
    warmup: int = 300
    decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 2.0
    memory_factor: float = 3.0
    min_length: int = 510
    max_length: int = 2040
    seed: int = 0
    schedule: Schedule = "constant"
    optimizer: OptimizerName = "adamw"
    eps: float = 1e-8
    epochs: float | None = None
    context_share: float = 0.5
    patience: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("warmup", 0), ("min_length", 2), ("seed", 0), ("patience", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.max_length < self.min_length:
            raise ValueError(f"max_length: expected at least min_length, {self.min_length}, got {self.max_length}")
        for name in ("learning_rate", "clip", "memory_factor", "eps", "epochs"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        for name, names in (("schedule", SCHEDULES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in names:
                raise ValueError(f"{name}: expected one of {', '.join(names)}, got {getattr(self, name)!r}")
        for name in ("decay", "context_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share above 0, at most 1, got {getattr(self, name)}")
        if self.decay != 1 and self.schedule == "constant":
            raise ValueError(f"decay: expected a schedule that falls beside it, linear or cosine, got {self.decay}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: expected a number of at least 0, got {self.weight_decay}")

    def for_rows(self, rows: int | None) -> Recipe:
        """The recipe with steps in place of epochs: as many as read `rows` rows so many times, the last one in full.

        Raises:
            ValueError: if there are epochs, and `rows` is None.
        """
        if self.epochs is None:
            return self
        if rows is None:
            raise ValueError(f"epochs: expected steps for rows drawn at random, which have no epoch, got {self.epochs}")
        return replace(self, steps=math.ceil(self.epochs * rows / self.batch), epochs=None)

    def context_of(self, length: int) -> int:
        """How many tokens of a passage are its context, at least 1."""
        return context_length(length, self.context_share)

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        rate = warmed_up(self.learning_rate, step, self.warmup)
        if self.schedule == "constant":
            return rate
        period = min(self.decay * self.steps, self.steps - self.warmup)
        left = min(1.0, (self.steps - step) / period) if period > 0 else 1.0
        return rate * (left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * max(left, 0.0))))

    def make_optimizer(self, parameters: Iterable[nn.Parameter] | Iterable[Group]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, or over groups of them with a learning rate each."""
        if self.optimizer == "adamw":
            return adamw(parameters, self.learning_rate, self.weight_decay, self.betas, self.eps)
        from gistkit.train.adafactor import Adafactor

        return Adafactor(split_groups(parameters, self.learning_rate, self.weight_decay), lr=self.learning_rate)

    @property
    def identity(self) -> dict[str, Any]:
        """The JSON values that determine the losses; the number of steps is one where the learning rate falls.

        Fields with their default are left out, if earlier releases did not have them.
        """
        values = asdict(self)
        del values["patience"], values["epochs"]
        if self.schedule == "constant":
            del values["steps"], values["decay"]
        if self.schedule in ("constant", "linear"):
            del values["schedule"]
        for name in ("optimizer", "eps", "context_share"):
            if values[name] == type(self).__dataclass_fields__[name].default:
                del values[name]
        return values


def context_length(length: int, share: float) -> int:
    """How many of `length` tokens are context, at least 1."""
    return max(1, int(length * share))


def warmed_up(learning_rate: float, step: int, warmup: int) -> float:
    """`learning_rate` after a linear warm-up: (step + 1) / warmup of it in step 0, 1, ..., warmup - 1."""
    return learning_rate * min(1.0, (step + 1) / max(warmup, 1))


def adamw(
    parameters: Iterable[nn.Parameter] | Iterable[Group],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW with weight decay on parameters with two or more axes alone.

    Args:
        parameters, learning_rate: as in `split_groups`.
        weight_decay, betas, eps: of AdamW.
    """
    return torch.optim.AdamW(
        split_groups(parameters, learning_rate, weight_decay), lr=learning_rate, betas=betas, eps=eps
    )


def split_groups(
    parameters: Iterable[nn.Parameter] | Iterable[Group], learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups of an optimizer, with weight decay on parameters with two or more axes alone.

    Args:
        parameters: parameters, or groups {"params": .., "lr": ..} as `Compressor.parameter_groups` returns.
        learning_rate: of parameters; a group's own, over this one, is its "factor" in the optimizer's groups.
        weight_decay: of the optimizer.
    """
    items: list[Any] = list(parameters)
    input_groups: list[Any] = (
        items if items and isinstance(items[0], Mapping) else [{"params": items, "lr": learning_rate}]
    )
    groups = []
    for group in input_groups:
        common = {"lr": group["lr"], "factor": group["lr"] / learning_rate}
        for axes, decay in ((range(2, 99), weight_decay), (range(2), 0.0)):
            members = [parameter for parameter in group["params"] if parameter.dim() in axes]
            if members:
                groups.append({"params": members, "weight_decay": decay, **common})
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Gives groups of `split_groups` a learning rate, times the factor of each."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["factor"]
