"""How closely memory tokens follow the context: slope, fit and focus of their attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from gistkit.compress import Compressor


@dataclass(frozen=True)
class Tracking:
    """How the attention of M memory tokens moves over L context tokens.

    Args:
        slope: tokens its centre of mass moves from one memory token to the next; r = L / M for even coverage.
        r_squared: how well a line fits the centres.
        own_segment: share of a memory token's attention in its own L / M context tokens; M^-1 where it is flat.
    """

    slope: float
    r_squared: float
    own_segment: float

    def as_dict(self) -> dict[str, float]:
        """The three figures by name."""
        return asdict(self)


def measure_tracking(weights: Tensor) -> Tracking:
    """Tracking of attention weights [M, L] of memory tokens over the context (any positive row scale).

    Raises:
        ValueError: if there are fewer than two memory tokens: a slope needs two.
    """
    memory, context = weights.shape
    if memory < 2:
        raise ValueError(f"weights: expected at least 2 memory tokens, got {memory}")
    share = weights.double() / weights.double().sum(-1, keepdim=True)
    centre = share @ torch.arange(context, dtype=torch.float64)
    slot = torch.arange(memory, dtype=torch.float64)
    x, y = slot - slot.mean(), centre - centre.mean()
    slope = (x * y).sum() / (x * x).sum()
    r_squared = (x * y).sum() ** 2 / ((x * x).sum() * (y * y).sum()).clamp(min=1e-30)
    own = [share[j, j * context // memory : (j + 1) * context // memory].sum() for j in range(memory)]
    return Tracking(float(slope), float(r_squared), float(torch.stack(own).mean()))


@torch.no_grad()
def memory_attention(compressor: Compressor, chunks: Tensor) -> list[Tensor]:
    """Attention of the memory tokens over one chunk of context: for each layer [M, L], mean over rows and heads.

    Args:
        compressor: an attached compressor.
        chunks: int64 [B, L], contexts of a single chunk.
    """
    length, maps = chunks.shape[1], []

    def record(layer: int, query: Tensor, key: Tensor) -> None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query[:, :, length:].double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
        # A memory token sees the whole chunk and the memory tokens up to itself.
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(length + 1)
        weights = logits.masked_fill(later.to(logits.device), -torch.inf).softmax(-1)
        maps.append(weights[..., :length].mean((0, 1)).cpu())

    compressor.encode(chunks, recorder=record)
    return maps
