"""Scores of keys by themselves, and controls of any comparison that look at nothing but places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit.common.checks import moved
from gistkit.compress.scores.score import Heads, Score, wide


@dataclass(frozen=True)
class KeyNorm(Score):
    """Short keys are kept: those of low norm get much attention (Devoto et al., arXiv 2406.11430)."""

    name = "key_norm"

    def __call__(self, heads: Heads) -> Tensor:
        return -wide(heads.key).norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff(Score):
    """Keys unlike the others are kept (Park et al., arXiv 2504.15364)."""

    name = "key_diff"

    def __call__(self, heads: Heads) -> Tensor:
        """Minus the cosine between each key and the mean of all keys of length 1."""
        key = F.normalize(wide(heads.key), dim=-1)
        return -F.cosine_similarity(key, key.mean(1, keepdim=True), dim=-1)


@dataclass(frozen=True)
class Streaming(Score):
    """The first `sinks` tokens and the last ones are kept (StreamingLLM, Xiao et al., arXiv 2309.17453)."""

    name = "streaming"
    sinks: int = 4

    def __post_init__(self) -> None:
        self.check(sinks=0)

    def __call__(self, heads: Heads) -> Tensor:
        return torch.arange(heads.key.shape[1], device=heads.key.device).float().expand(heads.key.shape[0], -1)


@dataclass(frozen=True)
class Even(Score):
    """Evenly spaced tokens are kept, from the first to the last."""

    name = "even"

    def __call__(self, heads: Heads) -> Tensor:
        """Above 1 for the kept tokens; where more or fewer are kept, these are spread by the golden ratio."""
        length, count = heads.key.shape[1], heads.count
        score = torch.arange(length, dtype=torch.float64) * (5**0.5 / 2 - 0.5) % 1
        score[torch.linspace(0, length - 1, count).round().long()] = 1 + score[:count]
        return moved(score, heads.key.device).expand(heads.key.shape[0], -1)


@dataclass(frozen=True)
class Random(Score):
    """Any tokens are kept, other ones in each head, the same ones for the same `seed` and length."""

    name = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        self.check(seed=0)

    def __call__(self, heads: Heads) -> Tensor:
        """Uniform in [0, 1)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + heads.layer)
        return moved(torch.rand(heads.key.shape[:2], generator=generator), heads.key.device)
