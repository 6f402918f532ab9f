"""How closely memory tokens follow the context: slope, fit and focus of their attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from gistkit.compress import Compressor
from gistkit.ops import AttentionRecorder


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
    length = chunks.shape[1]
    # In physical order the memory tokens follow the context.
    with AttentionRecorder(rows=slice(length, None), reduce="mean") as recorder:
        compressor.encode(chunks)
    return [one.weights[:, 0, :, :length].mean(0) for one in recorder.maps]
