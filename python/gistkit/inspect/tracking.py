"""How closely memory tokens follow the context: slope, fit and focus of their attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tracking:
    """How the attention of M memory tokens moves over L context tokens.

    Args:
        slope: context tokens that the centre of mass moves from one memory token to the next; r = L / M for even
            coverage. Flat attention besides the line reduces it.
        r_squared: how well a line fits the centres.
        own_segment: the focus, the share of a memory token's attention in its own L / M context tokens; 1 / M for flat
            attention.
        peak_slope: context tokens that the peak moves, which is the visible line in a map: the median over all pairs of
            memory tokens.
    """

    slope: float
    r_squared: float
    own_segment: float
    peak_slope: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def measure_tracking(weights: Tensor) -> Tracking:
    """Tracking of attention weights [M, L] of memory tokens over the context, each row of any scale.

    Memory tokens without attention to the context are ignored.

    Raises:
        ValueError: if the weights are not such a map, or fewer than two memory tokens attend to the context.
    """
    if weights.dim() != 2:
        raise ValueError(f"weights: expected [M, L], memory tokens and context, got shape {tuple(weights.shape)}")
    weights = weights.detach().cpu().double()
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError("weights: expected finite weights of at least 0, got others")
    memory, context = weights.shape
    total = weights.sum(-1)
    slots = total.nonzero()[:, 0]
    if len(slots) < 2:
        raise ValueError(f"weights: expected at least 2 memory tokens, got {len(slots)} with any attention")
    share, tokens = weights[slots] / total[slots, None], torch.arange(context, dtype=torch.float64)
    centre = share @ tokens
    x, y = slots - slots.double().mean(), centre - centre.mean()
    slope = (x * y).sum() / (x * x).sum()
    r_squared = (x * y).sum() ** 2 / ((x * x).sum() * (y * y).sum()).clamp(min=1e-30)
    # Of tokens that share the peak, their middle.
    highest = (share == share.amax(-1, keepdim=True)).double()
    peak = highest @ tokens / highest.sum(-1)
    first, second = torch.combinations(torch.arange(len(slots))).unbind(-1)
    steps = (peak[second] - peak[first]) / (slots[second] - slots[first])
    bounds = [(j * context // memory, (j + 1) * context // memory) for j in slots.tolist()]
    own_segment = [row[start:end].sum() for row, (start, end) in zip(share, bounds, strict=True)]
    return Tracking(float(slope), float(r_squared), float(torch.stack(own_segment).mean()), float(steps.median()))
