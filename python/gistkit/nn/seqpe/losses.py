"""SeqPE's two losses on position embeddings: contrastive, and distillation to positions outside of training's range."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def nearest_candidate(pivots: Tensor, candidates: Tensor) -> Tensor:
    """Index [B] of the candidate nearest to its pivot by Euclidean distance of positions; of equal ones the first.

    Args:
        pivots: integer positions [B] or [B, axes].
        candidates: [B, C] or [B, C, axes].

    Paper: SeqPE, Section 3.3, p+ of Equation 9.
    """
    if pivots.dim() not in (1, 2) or candidates.dim() != pivots.dim() + 1 or not candidates.numel():
        raise ValueError(
            "candidates: expected [B, C] beside pivots [B], or [B, C, axes] beside [B, axes], "
            f"got {list(candidates.shape)} beside {list(pivots.shape)}"
        )
    if candidates.shape[0] != pivots.shape[0] or candidates.shape[2:] != pivots.shape[1:]:
        raise ValueError(
            f"candidates: expected rows and axes of pivots {list(pivots.shape)}, got {list(candidates.shape)}"
        )
    squares = (candidates - pivots[:, None]).square()
    return (squares if pivots.dim() == 1 else squares.sum(-1)).argmin(1)


def contrastive_loss(pivots: Tensor, candidates: Tensor, positive: Tensor) -> Tensor:
    """L_delta: cross-entropy of dot products of a pivot's embedding with its candidates', mean over pivots.

    Args:
        pivots: embeddings [B, D].
        candidates: embeddings [B, C, D].
        positive: int64 [B], each pivot's nearest candidate, see `nearest_candidate`.

    Returns:
        A scalar, float32 or float64.

    Paper: SeqPE, Equation 9.
    """
    if pivots.dim() != 2 or candidates.dim() != 3 or candidates.shape[::2] != pivots.shape:
        raise ValueError(
            f"candidates: expected [B, C, D] beside pivots [B, D], got {list(candidates.shape)} beside "
            f"{list(pivots.shape)}"
        )
    if positive.shape != pivots.shape[:1]:
        raise ValueError(f"positive: expected [{pivots.shape[0]}] as pivots has rows, got {list(positive.shape)}")
    with torch.autocast(pivots.device.type, enabled=False):
        logits = torch.einsum("bd,bcd->bc", _precise(pivots), _precise(candidates))
        return F.cross_entropy(logits, positive)


def ood_loss(teacher: Tensor, student: Tensor, heads: int) -> Tensor:
    """L_OOD: similarities among shifted positions should equal those among training positions, in each head.

    It is KL(P || S), P without gradient, the mean over windows, heads and rows. P and S are softmaxes over the rows of
    each head's similarity matrix X X^T, without a temperature.

    Args:
        teacher: embeddings [W, m, D] of positions in training's range.
        student: embeddings [W, m, D] of the same positions, shifted by one shift a window.
        heads: number of heads that D is split into.

    Returns:
        A scalar, float32 or float64.

    Paper: SeqPE, Equation 10 and Appendix A.3.
    """
    if teacher.dim() != 3 or student.shape != teacher.shape:
        raise ValueError(
            f"student: expected [W, m, D] as teacher has, got {list(student.shape)} beside {list(teacher.shape)}"
        )
    if heads < 1 or teacher.shape[2] % heads:
        raise ValueError(f"heads: expected a divisor of the embeddings' width {teacher.shape[2]}, got {heads}")
    with torch.autocast(teacher.device.type, enabled=False):
        target, estimate = _similarities(teacher.detach(), heads), _similarities(student, heads)
        return (target.exp() * (target - estimate)).sum(-1).mean()


def _similarities(embeddings: Tensor, heads: int) -> Tensor:
    """[W, m, D] -> log-softmax over rows of each head's similarities, [W, heads, m, m]."""
    split = _precise(embeddings).unflatten(-1, (heads, -1)).transpose(1, 2)
    return (split @ split.transpose(-1, -2)).log_softmax(-1)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
