"""Learner: a model with any position encoding, its schedule, and its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from gistkit.common.processes import launched
from gistkit.nn import GPT, SeqPE, SeqPEPositions, ViT
from gistkit.nn.seqpe.regularizer import SeqPERegularizer
from gistkit_lab.studies.fitting import Progress, StudyRecipe, optimise

Model = TypeVar("Model", GPT, ViT)


@dataclass(frozen=True)
class PositionRecipe(StudyRecipe):
    """The model's sizes and the training of the model and its positions, for any model and task.

    Args:
        dim, layers, heads, dropout, attention_dropout: of the model.
        decay: of the learning rate after its warm-up, to `final` of it at the last step.
        beta_2: of AdamW, whose other one is 0.9.
        bfloat16: autocast to it, but for the encoder of positions.
        max_position, base, digits: of SeqPE; encoder_heads, encoder_layers, encoder_dropout: of its encoder, which is
            as wide as the model.
        position_std: of the first weights of encoder and projections, times dim ** -0.5.
        position_rate: learning rate of all that belongs to positions, as a factor; their weight decay is 0.
        position_clip: norm that the gradients of these are clipped to, by themselves.
        mul_start: of `SeqPEPositions`, for "seqpe-mul".
        pivots, candidates, windows, window_positions, contrastive_weight, ood_weight, shift_rate: of
            `SeqPERegularizer`.
    """

    dim: int = 128
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0
    attention_dropout: float = 0.0
    decay: Literal["cosine", "linear"] = "cosine"
    final: float = 0.1
    beta_2: float = 0.95
    bfloat16: bool = False
    max_position: int = 5000
    base: int = 10
    digits: int = 4
    encoder_heads: int = 4
    encoder_layers: int = 2
    encoder_dropout: float = 0.0
    position_std: float = 0.55
    position_rate: float = 1.0
    position_clip: float = 5.0
    mul_start: float = 1.0
    pivots: int = 32
    candidates: int = 32
    windows: int = 16
    window_positions: int = 32
    contrastive_weight: float = 0.1
    ood_weight: float = 0.1
    shift_rate: float = 0.1

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        progress = step / self.steps
        shape = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup, 1)) * (self.final + (1 - self.final) * shape)

    def encoder_options(self, arm: str, axes: int = 1) -> dict[str, Any]:
        """What `position_encoding` needs for an arm of SeqPE, a new encoder among it; nothing for others."""
        if not arm.startswith("seqpe"):
            return {}
        std = self.position_std * self.dim**-0.5
        encoder = SeqPE(
            self.dim, base=self.base, digits=self.digits, axes=axes, layers=self.encoder_layers,
            heads=self.encoder_heads, dropout=self.encoder_dropout, std=std,
        )  # fmt: skip
        return {"std": std, "encoder": encoder} | ({"mul_start": self.mul_start} if arm == "seqpe-mul" else {})


def without_losses(arm: str) -> dict[str, dict[str, float]]:
    """The weights of SeqPE's losses in the arms of its ablation (SeqPE, Table IV), by name."""
    delta, ood = {"contrastive_weight": 0.0}, {"ood_weight": 0.0}
    return {f"{arm}-no-delta": delta, f"{arm}-no-ood": ood, f"{arm}-no-delta-no-ood": delta | ood}


class StepPositions(NamedTuple):
    """The positions of a step's sequences, SeqPE's embeddings of them, and SeqPE's losses.

    Other encodings have None for positions and embeddings, which is the model's default, and no loss.
    """

    positions: Tensor | None
    embeddings: Tensor | None
    loss: Tensor | float


class Learner(Generic[Model]):
    """A model with a position encoding, the sampler of SeqPE's positions, and its training.

    Under `accelerate launch` or torchrun each process trains on its part of a batch, with the mean of all gradients.

    Args:
        schedule: of its training.
        model: with its `position`; moved to `device`.
        shape: of a training sequence's positions, see `SeqPERegularizer`.
        seed: of what is drawn for positions.
        device: where the model is.
        weights: SeqPE's `contrastive_weight` and `ood_weight`, where they are not the schedule's.
    """

    def __init__(
        self,
        schedule: PositionRecipe,
        model: Model,
        shape: int | Sequence[int],
        seed: int,
        device: str = "cpu",
        **weights: Any,
    ) -> None:
        self.schedule, self.seed, self.device = schedule, seed, device
        self.processes = launched()
        self.processes.part(schedule.batch)
        self.model: Model = model.to(device)
        self.encoder: SeqPE | None = None
        self.regularizer: SeqPERegularizer | None = None
        if isinstance(model.position, SeqPEPositions):
            self.encoder = model.position.encoder
            used: dict[str, Any] = {
                "contrastive_weight": schedule.contrastive_weight, "ood_weight": schedule.ood_weight, **weights
            }  # fmt: skip
            self.regularizer = SeqPERegularizer(
                self.encoder, shape, schedule.max_position, schedule.heads, **used, shift_rate=schedule.shift_rate,
                pivots=schedule.pivots, candidates=schedule.candidates, windows=schedule.windows,
                window_positions=schedule.window_positions, seed=seed,
            )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Those of the model with its positions."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def place(self, rows: int, step: int) -> StepPositions:
        """The positions of this process's part of a step's batch of so many rows, the same at every call."""
        if self.regularizer is None or self.encoder is None:
            return StepPositions(None, None, 0.0)
        sample = self.regularizer.draw(rows, step)
        encoded = self.encoder(sample.positions)
        main = sample.main if sample.main.dim() == 1 else sample.main[self.processes.part(rows)]
        return StepPositions(
            sample.positions[main], sample.embeddings(encoded, main), self.regularizer.losses(sample, encoded).total
        )

    def fit(
        self,
        loss: Callable[[int], Tensor],
        figures: Callable[[], tuple[float, ...]],
        state: Path,
        identity: dict[str, Any],
        *,
        resume: bool,
        bar: Any,
    ) -> Progress:
        """Trains to the last step.

        Args:
            loss: of step 0, 1, ..., the same at every call.
            figures, state, resume, bar: as in `optimise`.
            identity: JSON values that determine the run, besides schedule and seed.
        """
        parameters = list(self.model.named_parameters())
        of_positions = {id(parameter) for parameter in self.model.position.parameters()}
        positions = [parameter for _, parameter in parameters if id(parameter) in of_positions]
        model_parameters = [parameter for _, parameter in parameters if id(parameter) not in of_positions]
        matrices, vectors = (
            [x for x in model_parameters if (x.dim() >= 2) == is_matrix] for is_matrix in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": self.schedule.weight_decay, "factor": 1.0},
            {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
            {"params": positions, "weight_decay": 0.0, "factor": self.schedule.position_rate},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.schedule.learning_rate,
            betas=(0.9, self.schedule.beta_2),
        )
        # Dropout, where a model has it.
        torch.manual_seed(self.seed + 100_003 * self.processes.index)
        return optimise(
            self.schedule, parameters, loss, figures, state,
            {"recipe": asdict(self.schedule), "seed": self.seed} | identity,
            clips=[(model_parameters, self.schedule.clip), (positions, self.schedule.position_clip)],
            optimizer=optimizer, resume=resume, bar=bar,
        )  # fmt: skip

    def precision(self) -> AbstractContextManager[Any]:
        """bfloat16, where the schedule has it."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.schedule.bfloat16)
