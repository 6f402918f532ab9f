"""What the studies `length` and `retrieval` share: a GPT for each position encoding, and its training at one length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.nn import GPT, TEXT_ENCODINGS, PositionEncoding, SeqPE, SeqPEPositions, position_encoding
from gistkit.nn.block import Style
from gistkit.nn.seqpe_regularizer import SeqPERegularizer
from gistkit.studies.fitting import Progress, Training, optimise

IGNORE = -100
# Arms that train SeqPE without one of its losses.
ABLATIONS = {"seqpe-bias-no-delta": {"contrastive_weight": 0.0}, "seqpe-bias-no-ood": {"ood_weight": 0.0}}
ARMS = (*TEXT_ENCODINGS, *ABLATIONS)


@dataclass(frozen=True)
class Sizes(Training):
    """What the model is, how it and its positions are trained, whatever the task.

    Args:
        length: L, the tokens of a sequence in training.
        longest: it is tested at L, 2 L, 4 L, ..., up to this many times L.
        dim, layers, heads, hidden_dim, dropout, style: of `gistkit.nn.GPT`.
        decay: of the learning rate after its warm-up, to `final` of it at the last step.
        bfloat16: autocast to it, but for the encoder of positions.
        max_position, base, digits: of SeqPE; encoder_heads, encoder_layers, encoder_dropout: of its encoder, which is
            as wide as the model.
        position_std: of the first weights of encoder and projections, times dim ** -0.5.
        position_rate: learning rate of all that belongs to positions, as a factor; their weight decay is 0.
        position_clip: norm that the gradients of these are clipped to, by themselves.
        mul_start: of `SeqPEPositions`, for "seqpe-mul".
        pivots, candidates, windows, window_positions, contrastive_weight, ood_weight, shift_rate: of
            `SeqPERegularizer`.
        sinusoid_scale: of `Sinusoidal`, so that it is as large as the embedded tokens.
    """

    steps: int = 1000
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    eval_every: int = 250
    length: int = 128
    longest: int = 32
    dim: int = 128
    layers: int = 2
    heads: int = 4
    hidden_dim: int | None = None
    dropout: float = 0.0
    style: Style = "llama"
    decay: Literal["cosine", "linear"] = "cosine"
    final: float = 0.1
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
    sinusoid_scale: float = 0.02 * math.sqrt(2)

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

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        done = step / self.steps
        shape = (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup, 1)) * (self.final + (1 - self.final) * shape)


@dataclass(frozen=True)
class Arm:
    """A position encoding by its name, or SeqPE without one of its losses."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ARMS:
            raise ValueError(f"name: expected one of {', '.join(ARMS)}, got {self.name!r}")

    @property
    def encoding(self) -> str:
        """Its name for `position_encoding`."""
        return "seqpe-bias" if self.name in ABLATIONS else self.name


class Student:
    """A model, how SeqPE's positions are drawn for it, and its training.

    Args:
        sizes: of model and training.
        arm: its position encoding.
        vocabulary: tokens.
        seed: of weights and of what is drawn for positions; all but the positions' weights is the same for all arms.
        device: where the model is.
    """

    def __init__(self, sizes: Sizes, arm: Arm, vocabulary: int, seed: int, device: str = "cpu") -> None:
        self.sizes, self.arm, self.seed, self.device = sizes, arm, seed, device
        torch.manual_seed(seed)
        position = _position(sizes, arm)
        torch.manual_seed(seed)
        self.model = GPT(
            vocabulary, sizes.dim, sizes.layers, sizes.heads, position, hidden_dim=sizes.hidden_dim,
            dropout=sizes.dropout, style=sizes.style,
        ).to(device)  # fmt: skip
        self.encoder = position.encoder if isinstance(position, SeqPEPositions) else None
        self.regularizer = None if self.encoder is None else _regularizer(sizes, arm, self.encoder, seed)

    def loss(self, step: int, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of a step: mean cross-entropy of labels [B, N] that are not -100, and SeqPE's two.

        Args:
            input_ids: int64 [B, N], N at most the training length.
            labels: int64 [B, N], each the token after that of `input_ids`, or -100.
        """
        self.model.train()
        input_ids, labels = input_ids.to(self.device), labels.to(self.device)
        if self.regularizer is None or self.encoder is None:
            with self._precision():
                return _cross_entropy(self.model(input_ids), labels)
        drawn, count = self.regularizer.draw(len(input_ids), step), input_ids.shape[1]
        encoded = self.encoder(drawn.positions)
        positions, embeddings = drawn.positions[drawn.main], drawn.embeddings(encoded)
        with self._precision():
            logits = self.model(input_ids, positions[..., :count], embeddings=embeddings[..., :count, :])
        return _cross_entropy(logits, labels) + self.regularizer.losses(drawn, encoded).total

    @torch.no_grad()
    def logits(self, input_ids: Tensor, *, last: int | None = None) -> Tensor:
        """float32 logits [B, N or `last`, vocabulary] of `input_ids` [B, N], or of so many last tokens alone."""
        self.model.eval()
        # Positions are encoded in full precision.
        embeddings = None if self.encoder is None else self.encoder(torch.arange(input_ids.shape[1]))
        with self._precision():
            hidden = self.model.hidden(input_ids.to(self.device), embeddings=embeddings)
            return self.model.head(hidden if last is None else hidden[:, -last:]).float()

    @property
    def parameters(self) -> int:
        """Those of the model with its positions."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def fit(
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
            figures, state, resume, bar: as in `optimise`.
            data: JSON values that decide the batches.
        """
        named = list(self.model.named_parameters())
        of_positions = {id(parameter) for parameter in self.model.position.parameters()}
        positions = [parameter for _, parameter in named if id(parameter) in of_positions]
        others = [parameter for _, parameter in named if id(parameter) not in of_positions]
        matrices, vectors = ([x for x in others if (x.dim() >= 2) == wanted] for wanted in (True, False))
        groups = [
            {"params": matrices, "weight_decay": self.sizes.weight_decay, "factor": 1.0},
            {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
            {"params": positions, "weight_decay": 0.0, "factor": self.sizes.position_rate},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.sizes.learning_rate, betas=(0.9, 0.95)
        )
        identity = {"recipe": asdict(self.sizes), "data": data, "arm": self.arm.name, "seed": self.seed}
        # Dropout, where a model has it.
        torch.manual_seed(self.seed)
        return optimise(
            self.sizes, named, optimizer, lambda step: self.loss(step, *batch(step)), figures, state, identity,
            learning_rate=self.sizes.learning_rate_at,
            clips=[(others, self.sizes.clip), (positions, self.sizes.position_clip)],
            resume=resume, bar=bar,
        )  # fmt: skip

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.sizes.bfloat16)


def arms(names: Sequence[str] = ARMS) -> list[Arm]:
    """The arms of these names."""
    return [Arm(name) for name in names]


def _position(sizes: Sizes, arm: Arm) -> PositionEncoding:
    options: dict[str, Any] = {}
    std = sizes.position_std * sizes.dim**-0.5
    match arm.encoding:
        case "sinusoidal":
            options = {"scale": sizes.sinusoid_scale}
        case "learned":
            options = {"length": sizes.length}
        case "seqpe-sum" | "seqpe-bias":
            options = {"std": std, "encoder": _encoder(sizes, std)}
        case "seqpe-mul":
            options = {"std": std, "encoder": _encoder(sizes, std), "mul_start": sizes.mul_start}
    return position_encoding(
        arm.encoding, heads=sizes.heads, head_dim=sizes.dim // sizes.heads, layers=sizes.layers, **options
    )


def _encoder(sizes: Sizes, std: float) -> SeqPE:
    return SeqPE(
        sizes.dim, base=sizes.base, digits=sizes.digits, layers=sizes.encoder_layers, heads=sizes.encoder_heads,
        dropout=sizes.encoder_dropout, std=std,
    )  # fmt: skip


def _regularizer(sizes: Sizes, arm: Arm, encoder: SeqPE, seed: int) -> SeqPERegularizer:
    weights: dict[str, Any] = {"contrastive_weight": sizes.contrastive_weight, "ood_weight": sizes.ood_weight}
    return SeqPERegularizer(
        encoder, sizes.length, sizes.max_position, sizes.heads, **(weights | ABLATIONS.get(arm.name, {})),
        shift_rate=sizes.shift_rate, pivots=sizes.pivots, candidates=sizes.candidates, windows=sizes.windows,
        window_positions=sizes.window_positions, seed=seed,
    )  # fmt: skip


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
