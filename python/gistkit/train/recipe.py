"""Recipe: the schedule of a training run, and the papers' as presets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# Parameters and their learning rate, as torch's optimizers take them.
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run besides data and compressor; the defaults pretrain as in Position IDs Matter.

    Args:
        steps: updates of the weights.
        batch: rows of a step over all processes and accumulated passes.
        learning_rate: of AdamW, constant once warmed up, and until it falls.
        warmup: steps over which the learning rate grows linearly from learning_rate / warmup; 0: none.
        decay: share of the steps, 0 to 1, at whose end the learning rate has fallen linearly to 0; 0: it stays.
        betas: of AdamW.
        weight_decay: of AdamW, on parameters with two or more axes alone.
        clip: largest norm of the gradient.
        memory_factor: learning rate of the gists' own parameters, over that of the others (GistPool).
        min_length, max_length: of a passage, context and continuation together, in tokens. Contexts of questions are
            cut to max_length.
        seed: of batches and dropout.
    """

    steps: int = 20_000
    batch: int = 16
    learning_rate: float = 1e-4
    warmup: int = 300
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 2.0
    memory_factor: float = 3.0
    min_length: int = 510
    max_length: int = 2040
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("warmup", 0), ("min_length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.max_length < self.min_length:
            raise ValueError(f"max_length: expected at least min_length, {self.min_length}, got {self.max_length}")
        for name in ("learning_rate", "clip", "memory_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay: expected a share from 0 to 1, got {self.decay}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: expected a number of at least 0, got {self.weight_decay}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        falling = (self.steps - step) / (self.decay * self.steps) if self.decay else 1.0
        return warmed_up(self.learning_rate, step, self.warmup) * min(1.0, falling)

    def optimizer(self, parameters: Iterable[nn.Parameter] | Iterable[Group]) -> torch.optim.AdamW:
        """AdamW over `parameters`, or over groups of them with a learning rate each."""
        return adamw(parameters, self.learning_rate, self.weight_decay, self.betas)


def warmed_up(learning_rate: float, step: int, warmup: int) -> float:
    """`learning_rate` after a linear warm-up: (step + 1) / warmup of it in step 0, 1, ..., warmup - 1."""
    return learning_rate * min(1.0, (step + 1) / max(warmup, 1))


def adamw(
    parameters: Iterable[nn.Parameter] | Iterable[Group],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
) -> torch.optim.AdamW:
    """AdamW with weight decay on parameters with two or more axes alone.

    Args:
        parameters: parameters, or groups {"params": .., "lr": ..} as `Compressor.parameter_groups` returns.
        learning_rate: of parameters; a group's own, over this one, is its "factor" in the optimizer's groups.
        weight_decay, betas: of AdamW.
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
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Gives the groups of `adamw` a learning rate, times the factor of each."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["factor"]


@dataclass(frozen=True)
class Preset:
    """A recipe and the compressor it was made for.

    Args:
        recipe: the schedule.
        compressor: keyword arguments of `Compressor`, the layout left out.
    """

    recipe: Recipe = field(default_factory=Recipe)
    compressor: Mapping[str, Any] = field(default_factory=dict)


_PAPER = {"chunk": 510, "ratio": 5, "lora": 128}

PRESETS: Mapping[str, Preset] = {
    "pretrain": Preset(Recipe(), _PAPER | {"losses": ("ae", "lm")}),
    "finetune": Preset(Recipe(learning_rate=5e-5), _PAPER | {"losses": ("qa",)}),
    # Contexts of 64 tokens: minutes on a CPU with SmolLM2-135M.
    "smollm2-small": Preset(
        Recipe(steps=95, batch=4, learning_rate=1e-3, warmup=10, weight_decay=0.0, min_length=128, max_length=128),
        {"chunk": 64, "ratio": 4, "lora": 64, "losses": ("ae",)},
    ),
}


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
