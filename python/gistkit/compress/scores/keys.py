"""KeyNorm and KeyDiff: scores of keys by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from gistkit.compress.scores.score import Heads, Score, wide


@dataclass(frozen=True)
class KeyNorm(Score):
    """Short keys are kept: those of low norm get much attention (Devoto et al., arXiv 2406.11430)."""

    name = "key_norm"

    def __call__(self, heads: Heads) -> Tensor:
        """Minus the norm of each key."""
        return -wide(heads.key).norm(dim=-1)


@dataclass(frozen=True)
class KeyDiff(Score):
    """Keys unlike the others are kept (Park et al., arXiv 2504.15364)."""

    name = "key_diff"

    def __call__(self, heads: Heads) -> Tensor:
        """Minus the cosine between each key and the mean of all keys of length 1."""
        key = F.normalize(wide(heads.key), dim=-1)
        return -F.cosine_similarity(key, key.mean(1, keepdim=True), dim=-1)
