"""ExpectedAttention: the attention that later queries will probably pay to a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import ops
from gistkit.compress.scores.score import Heads, Score, wide


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Keys are kept that a normal distribution of later queries attends to (Devoto et al., arXiv 2510.00636).

    Its mean and covariance are those of the text's queries before rotation, which RoPE then rotates to the mean of the
    next `future` positions. A weight exp(q k / sqrt(D)) has the expectation exp(mean k / sqrt(D) + k cov k / 2D); it
    counts as much as the norm of the value.

    Args:
        future: positions after the text.
        sinks: first tokens, which are kept, and whose queries, unlike all others, do not count.
    """

    name = "expected_attention"
    needs_rope = True
    future: int = 512
    sinks: int = 4

    def __post_init__(self) -> None:
        self.check(future=1, sinks=0)

    def __call__(self, heads: Heads) -> Tensor:
        """Expected weights, averaged over the query heads of a key head, times the norms of values.

        The weights of the tokens after the sinks have the sum 1.
        """
        length = heads.key.shape[1]
        if length <= self.sinks:
            return heads.key.new_full(heads.key.shape[:2], torch.inf, dtype=torch.float32)
        inv_freq = heads.inv_freq
        if inv_freq is None:
            raise ValueError("by: expected_attention needs a model with a RoPE that gistkit supports, got another")
        places = torch.arange(length, device=heads.key.device)
        query = ops.rerotate(wide(heads.query)[None], -places, inv_freq)[0, :, self.sinks :]
        turn = _mean_rotation(length + torch.arange(self.future, device=query.device), inv_freq, query)
        mean = query.mean(1)
        centred = query - mean[:, None]
        covariance = turn @ (centred.mT @ centred / centred.shape[1]) @ turn.mT
        key = wide(heads.key)
        per_query = key.repeat_interleave(len(query) // len(key), 0)
        logits = torch.einsum("hnd,hd->hn", per_query, mean @ turn.mT) * heads.scale
        logits += torch.einsum("hni,hij,hnj->hn", per_query, covariance, per_query) * (heads.scale**2 / 2)
        # Of the first tokens, which are no part of the sum, none counts more than all others.
        weights = (logits - logits[:, self.sinks :].logsumexp(-1, keepdim=True)).clamp(max=0).exp()
        return weights.unflatten(0, (len(key), -1)).mean(1) * wide(heads.value).norm(dim=-1)


def _mean_rotation(positions: Tensor, inv_freq: Tensor, like: Tensor) -> Tensor:
    """The mean [D, D] of RoPE's rotations to `positions`; dimensions beyond 2 x frequencies are not rotated."""
    angles = positions[:, None].double() * inv_freq.double()
    cos, sin = angles.cos().mean(0), angles.sin().mean(0)
    half, rest = len(inv_freq), like.shape[-1] - 2 * len(inv_freq)
    turn = torch.diag(F.pad(torch.cat([cos, cos]), (0, rest), value=1.0))
    turn[:half, half : 2 * half] = -torch.diag(sin)
    turn[half : 2 * half, :half] = torch.diag(sin)
    return turn.to(like)
