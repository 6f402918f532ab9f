"""SeqPE in a training step: the positions to encode, in one call for all uses, and the two losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.nn.seqpe.encoder import SeqPE
from gistkit.nn.seqpe.losses import contrastive_loss, nearest_candidate, ood_loss
from gistkit.nn.seqpe.samplers import ContrastiveSampler, StartSampler, WindowSampler, as_number, as_position


@dataclass(frozen=True, eq=False)
class SeqPEStep:
    """The distinct positions of one step, and the indices of each use into them.

    Args:
        positions: distinct, in ascending order, int64 [U] or [U, axes] on the CPU: the encoder's input.
        main: int64 indices into them, of the sequences' positions: [N], or [B, N] where any sequence is shifted.
        shifted: bool [B], the sequences that begin at a random start.
        pivots, candidates, positive: indices [P] and [P, C], and each pivot's nearest candidate, [P]; None without
            the contrastive loss.
        teacher, student: indices [W, m]; None without the loss on shifted windows.
    """

    positions: Tensor
    main: Tensor
    shifted: Tensor
    pivots: Tensor | None = None
    candidates: Tensor | None = None
    positive: Tensor | None = None
    teacher: Tensor | None = None
    student: Tensor | None = None

    def embeddings(self, encoded: Tensor, index: Tensor | None = None) -> Tensor:
        """The rows of `encoded` [U, D] of the sequences' positions, [N, D] or [B, N, D], or of other indices."""
        if encoded.dim() != 2 or len(encoded) != len(self.positions):
            raise ValueError(
                f"encoded: expected [{len(self.positions)}, D], a row a position of the step, got {list(encoded.shape)}"
            )
        return F.embedding((self.main if index is None else index).to(encoded.device), encoded)


class SeqPELosses(NamedTuple):
    """The losses of a step, scalars; `total` is weighted, the others are not."""

    contrastive: Tensor
    ood: Tensor
    total: Tensor


class SeqPERegularizer:
    """Draws the positions of each training step, and computes SeqPE's losses from one encoder call.

    A step of training:

        step = regularizer.draw(len(input_ids))
        encoded = encoder(step.positions)
        loss = task(input_ids, step.embeddings(encoded)) + regularizer.losses(step, encoded).total

    Args:
        encoder: its base, digits and axes are those of the positions.
        shape: L of training, the positions of a sequence; with several axes the positions on each, and a sequence's
            are in the order of rows.
        max_position: L_max; every position drawn is below it, on every axis.
        heads: of the model, which the embeddings are split into for `ood_loss`.
        contrastive_weight, ood_weight: alpha and beta of Equation 15; with 0 a loss and its positions are left out.
        shift_rate: share of sequences at a random start.
        pivots, candidates: of the contrastive loss, see `ContrastiveSampler`.
        windows, window_positions: of the loss on shifted windows, see `WindowSampler`; None: 32 positions, or all of a
            smaller shape.
        seed: of all that is drawn; the draws of one loss do not depend on whether the other is on.

    Paper: SeqPE, Equation 15 and Appendix A.
    """

    def __init__(
        self,
        encoder: SeqPE,
        shape: int | Sequence[int],
        max_position: int,
        heads: int,
        *,
        contrastive_weight: float = 0.1,
        ood_weight: float = 0.1,
        shift_rate: float = 0.1,
        pivots: int = 32,
        candidates: int = 32,
        windows: int = 32,
        window_positions: int | None = None,
        seed: int = 0,
    ) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if len(sizes) != encoder.axes:
            raise ValueError(f"shape: expected the positions on {encoder.axes} axes as encoder has, got {shape}")
        if max_position > encoder.limit:
            raise ValueError(
                f"max_position: expected at most {encoder.limit}, what {encoder.digits} digits of base {encoder.base} "
                f"reach, got {max_position}"
            )
        if heads < 1 or encoder.out_dim % heads:
            raise ValueError(f"heads: expected a divisor of the encoder's output width {encoder.out_dim}, got {heads}")
        for name, weight in (("contrastive_weight", contrastive_weight), ("ood_weight", ood_weight)):
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name}: expected a number of at least 0, got {weight!r}")
        self.axes, self.max_position, self.heads = encoder.axes, max_position, heads
        self.contrastive_weight, self.ood_weight = contrastive_weight, ood_weight
        if window_positions is None:
            window_positions = min(32, math.prod(sizes))
        seeds = [int(value) for value in np.random.SeedSequence(seed).generate_state(3, np.uint64) >> np.uint64(1)]
        self.starts = StartSampler(sizes, max_position, rate=shift_rate, seed=seeds[0])
        self.contrastive = (
            ContrastiveSampler(pivots, candidates, max_position, axes=encoder.axes, base=encoder.base, seed=seeds[1])
            if contrastive_weight
            else None
        )
        self.windows = (
            WindowSampler(windows, window_positions, sizes, max_position, seed=seeds[2]) if ood_weight else None
        )
        self._grid = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, encoder.axes)

    def draw(self, batch_size: int, step: int | None = None) -> SeqPEStep:
        """The positions of a step with `batch_size` sequences.

        Args:
            step: its number, from 0; each number always draws the same, so training resumes without a state. None: the
                next draw.
        """
        if step is not None:
            for sampler in (self.starts, self.contrastive, self.windows):
                if sampler is not None:
                    sampler.seek(step)
        starts, shifted = self.starts.draw(batch_size)
        any_shifted = bool(shifted.any())
        uses = {"main": self._grid + starts[:, None] if any_shifted else self._grid}
        positive = None
        if self.contrastive is not None:
            uses["pivots"], uses["candidates"] = self.contrastive.draw()
            positive = nearest_candidate(uses["pivots"], uses["candidates"])
        if self.windows is not None:
            uses["teacher"], uses["student"] = self.windows.draw()
        numbers = {
            name: positions if self.axes == 1 and name != "main" else as_number(positions, self.max_position)
            for name, positions in uses.items()
        }
        distinct, inverse = torch.unique(torch.cat([use.flatten() for use in numbers.values()]), return_inverse=True)
        parts = inverse.split([use.numel() for use in numbers.values()])
        indices = {name: part.view(use.shape) for (name, use), part in zip(numbers.items(), parts, strict=True)}
        positions = distinct if self.axes == 1 else as_position(distinct, self.max_position, self.axes)
        return SeqPEStep(positions, shifted=shifted, positive=positive, **indices)

    def losses(self, step: SeqPEStep, encoded: Tensor) -> SeqPELosses:
        """The losses of a step's embeddings [U, D], what the encoder gives of `step.positions`."""
        contrastive = ood = encoded.new_zeros((), dtype=torch.promote_types(encoded.dtype, torch.float32))
        if step.pivots is not None and step.candidates is not None and step.positive is not None:
            contrastive = contrastive_loss(
                step.embeddings(encoded, step.pivots),
                step.embeddings(encoded, step.candidates),
                step.positive.to(encoded.device),
            )
        if step.teacher is not None and step.student is not None:
            ood = ood_loss(step.embeddings(encoded, step.teacher), step.embeddings(encoded, step.student), self.heads)
        return SeqPELosses(contrastive, ood, self.contrastive_weight * contrastive + self.ood_weight * ood)
