"""Recipe: the schedule of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from gistkit.common.declared import check, declared, documented

if TYPE_CHECKING:
    import torch
    from torch import nn

# Parameters and their learning rate, as torch's optimizers take them.
Group = Mapping[str, Any]


Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adafactor"]


@documented
@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run besides data and compressor; the defaults pretrain as in Position IDs Matter.

    Of `epochs` and `steps` the first count; see `for_rows`. `betas` are AdamW's. Contexts of questions are cut to
    `max_length`. Adafactor is torch's, and the schedules are transformers' of these names.
    """

    steps: int = declared(20_000, "updates", least=1)
    batch: int = declared(16, "passages a step, over all processes and accumulated passes", least=1)
    learning_rate: float = declared(1e-4, "after the warm-up; adafactor's is relative to a parameter's size", above=0)
    warmup: int = declared(300, "steps of linear warm-up, from learning_rate / warmup; 0: none", least=0)
    decay: float = declared(
        1.0, "last share of the steps, in which the learning rate falls to 0; 1: all after the warm-up", above=0, most=1
    )
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = declared(0.1, "of matrices only", least=0)
    clip: float = declared(2.0, "largest norm of the gradient", above=0)
    memory_factor: float = declared(
        3.0, "learning rate of gists' own parameters over that of the others (GistPool)", above=0
    )
    min_length: int = declared(510, "shortest passage in tokens, context and continuation together", least=2)
    max_length: int = declared(2040, "longest passage in tokens", least=2)
    seed: int = declared(0, "random seed of new weights, batches and dropout", least=0)
    schedule: Schedule = declared(
        "constant", "how the learning rate falls after the warm-up", among=("constant", "linear", "cosine")
    )
    optimizer: OptimizerName = declared("adamw", "AdamW, or torch's Adafactor", among=("adamw", "adafactor"))
    eps: float = declared(1e-8, "epsilon of AdamW", above=0)
    epochs: float | None = declared(None, "passes over the data, instead of steps", above=0)
    context_share: float = declared(
        0.5, "share of a passage that is its context; the rest is its continuation", above=0, most=1
    )
    patience: int | None = declared(
        None,
        "end the run after N evaluations in a row without a lower held-out loss, and keep the weights of the lowest",
        least=1,
    )

    def __post_init__(self) -> None:
        check(self)
        betas = self.betas if isinstance(self.betas, Sequence) else ()
        if len(betas) != 2 or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers >= 0, below 1, got {self.betas!r}")
        if self.max_length < self.min_length:
            raise ValueError(f"max_length: expected at least min_length, {self.min_length}, got {self.max_length}")
        if self.decay != 1 and self.schedule == "constant":
            raise ValueError(f"decay: expected schedule linear or cosine with it, got constant and decay {self.decay}")

    def for_rows(self, rows: int | None) -> Recipe:
        """The recipe with steps instead of epochs: as many as read `rows` rows so many times, the last one in full."""
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
        from torch.optim import Adafactor

        return Adafactor(split_groups(parameters, self.learning_rate, self.weight_decay), lr=self.learning_rate)

    @property
    def identity(self) -> dict[str, Any]:
        """The JSON values that determine the losses; the number of steps is one where the learning rate falls."""
        others = {"patience", "epochs", *(("steps", "decay") if self.schedule == "constant" else ())}
        return {name: value for name, value in asdict(self).items() if name not in others}


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
    """AdamW with weight decay on parameters with two or more axes only; see `split_groups`."""
    from torch.optim import AdamW

    return AdamW(split_groups(parameters, learning_rate, weight_decay), lr=learning_rate, betas=betas, eps=eps)


def split_groups(
    parameters: Iterable[nn.Parameter] | Iterable[Group], learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups of an optimizer, with weight decay on parameters with two or more axes only.

    Args:
        parameters: parameters, or groups {"params": .., "lr": ..} as `Compressor.parameter_groups` returns.
        learning_rate: of parameters; a group's own, over this one, is its "factor" in the optimizer's groups.
        weight_decay: of the optimizer.
    """
    items: list[Any] = list(parameters)
    if not items or not isinstance(items[0], Mapping):
        items = [{"params": items, "lr": learning_rate}]
    groups = []
    for group in items:
        common = {"lr": group["lr"], "factor": group["lr"] / learning_rate}
        for axes, decay in ((range(2, 99), weight_decay), (range(2), 0.0)):
            members = [parameter for parameter in group["params"] if parameter.dim() in axes]
            if members:
                groups.append({"params": members, "weight_decay": decay, **common})
    return groups
