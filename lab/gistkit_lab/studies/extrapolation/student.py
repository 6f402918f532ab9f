"""Student: a GPT with any position encoding, and its training at one length, for `length` and `retrieval`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.common.checks import IGNORE
from gistkit.nn import GPT, TEXT_ENCODINGS, PositionEncoding, position_encoding
from gistkit.nn.models.block import Style
from gistkit_lab.studies.extrapolation.learner import Learner, PositionRecipe, without_losses
from gistkit_lab.studies.fitting import Progress

# Arms that train SeqPE without one of its losses, or without both.
ABLATIONS = without_losses("seqpe-bias")
ARMS = (*TEXT_ENCODINGS, *ABLATIONS)


@dataclass(frozen=True)
class Sizes(PositionRecipe):
    """The model's sizes and the training of the model and its positions, for any task.

    Args:
        length: L, the tokens of a sequence in training.
        longest: it is tested at L, 2 L, 4 L, ..., up to this many times L.
        hidden_dim, style: of `gistkit.nn.GPT`; weight_std: its `std`, which a table of positions has too.
        sinusoid_scale: of `Sinusoidal`; None: as large as the embedded tokens.
    """

    steps: int = 1000
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    eval_every: int = 250
    length: int = 128
    longest: int = 32
    hidden_dim: int | None = None
    style: Style = "llama"
    weight_std: float = 0.02
    sinusoid_scale: float | None = None

    def __post_init__(self) -> None:
        if self.longest < 1 or self.longest & (self.longest - 1):
            raise ValueError(f"longest: expected a power of two, got {self.longest}")
        if self.length * self.longest > min(self.max_position, self.base**self.digits):
            raise ValueError(
                f"longest: expected at most {min(self.max_position, self.base**self.digits)} positions, "
                f"got {self.longest} x {self.length}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """L, 2 L, ... that the model is tested at."""
        return tuple(self.length << power for power in range(self.longest.bit_length()))


@dataclass(frozen=True)
class Arm:
    """A position encoding by its name, or SeqPE without some of its losses."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ARMS:
            raise ValueError(f"name: expected one of {', '.join(ARMS)}, got {self.name!r}")

    @property
    def encoding(self) -> str:
        """Its name for `position_encoding`."""
        return "seqpe-bias" if self.name in ABLATIONS else self.name


class Student(Learner[GPT]):
    """A language model and its training.

    Args:
        sizes: of model and training.
        arm: its position encoding.
        vocabulary: tokens.
        seed: of weights and of what is drawn for positions; all but the positions' weights is the same for all arms.
        device: where the model is.
    """

    def __init__(self, sizes: Sizes, arm: Arm, vocabulary: int, seed: int, device: str = "cpu") -> None:
        self.arm = arm
        torch.manual_seed(seed)
        position = _position(sizes, arm)
        torch.manual_seed(seed)
        model = GPT(
            vocabulary, sizes.dim, sizes.layers, sizes.heads, position, hidden_dim=sizes.hidden_dim,
            dropout=sizes.dropout, attention_dropout=sizes.attention_dropout, style=sizes.style, std=sizes.weight_std,
        )  # fmt: skip
        super().__init__(sizes, model, sizes.length, seed, device, **ABLATIONS.get(arm.name, {}))

    def loss(self, step: int, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of a step: mean cross-entropy of labels [B, N] that are not -100, and SeqPE's two.

        Several processes have a part of the rows each, and the mean of their losses is that of the batch.

        Args:
            input_ids: int64 [B, N], N at most the training length.
            labels: int64 [B, N], each the token after that of `input_ids`, or -100.
        """
        self.model.train()
        positions, embeddings, loss = self.place(len(input_ids), step)
        part = self.processes.part(len(input_ids))
        weight = _weight(labels, part, self.processes.count)
        input_ids, labels = input_ids[part].to(self.device), labels[part].to(self.device)
        if positions is not None and embeddings is not None:
            count = input_ids.shape[1]
            positions, embeddings = positions[..., :count], embeddings[..., :count, :]
        with self.precision():
            logits = self.model(input_ids, positions, embeddings=embeddings)
        return _cross_entropy(logits, labels) * weight + loss

    @torch.no_grad()
    def logits(self, input_ids: Tensor, *, last: int | None = None, where: Tensor | None = None) -> Tensor:
        """float32 logits [B, N, vocabulary] of `input_ids` [B, N].

        Args:
            last: of so many last tokens alone, [B, last, vocabulary].
            where: bool [B, N], of these tokens alone, [n, vocabulary].
        """
        self.model.eval()
        # Positions are encoded in full precision.
        embeddings = None if self.encoder is None else self.encoder(torch.arange(input_ids.shape[1]))
        with self.precision():
            hidden_states = self.model.hidden(input_ids.to(self.device), embeddings=embeddings)
            if where is not None:
                hidden_states = hidden_states[where.to(self.device)]
            elif last is not None:
                hidden_states = hidden_states[:, -last:]
            return self.model.head(hidden_states).float()

    def train(
        self,
        batch: Callable[[int], tuple[Tensor, Tensor]],
        figures: Callable[[], tuple[float, ...]],
        state: Path,
        data: dict[str, Any],
        *,
        resume: bool,
        bar: Any,
    ) -> Progress:
        """Trains to the last step.

        Args:
            batch: (input_ids, labels) of step 0, 1, ..., the same at every call.
            figures, state, resume, bar: as in `fit`.
            data: JSON values that determine the batches.
        """
        identity = {"data": data, "arm": self.arm.name}
        return self.fit(lambda step: self.loss(step, *batch(step)), figures, state, identity, resume=resume, bar=bar)


def arms(names: Sequence[str] = ARMS) -> list[Arm]:
    """The arms of these names."""
    return [Arm(name) for name in names]


def _position(sizes: Sizes, arm: Arm) -> PositionEncoding:
    options: dict[str, Any] = sizes.encoder_options(arm.encoding)
    match arm.encoding:
        case "sinusoidal":
            scale = sizes.sinusoid_scale
            options = {"scale": sizes.weight_std * math.sqrt(2) if scale is None else scale}
        case "learned":
            options = {"length": sizes.length, "std": sizes.weight_std}
    return position_encoding(
        arm.encoding, heads=sizes.heads, head_dim=sizes.dim // sizes.heads, layers=sizes.layers, **options
    )


def _weight(labels: Tensor, part: slice, parts: int) -> float:
    """What the mean over one of several parts of a batch counts in the mean of the parts' means."""
    counted = labels != IGNORE
    return float(counted[part].sum()) * parts / float(counted.sum()) if parts > 1 else 1.0


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
