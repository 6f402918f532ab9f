"""SnapKV: the attention of a text's last queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit.compress.scores.score import Heads, Score, wide


@dataclass(frozen=True)
class SnapKV(Score):
    """Keys are kept that the last `window` tokens attend to, and these tokens (Li et al., arXiv 2404.14469).

    It suits texts that end with what is asked of them; a `question` of `Select` is the window.

    Args:
        window: last tokens; at most half of a text.
        kernel: neighbours over which weights are averaged, an odd number.
    """

    name = "snapkv"
    reads_question = True
    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        self.check(window=1, kernel=1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd number, got {self.kernel}")

    def __call__(self, heads: Heads) -> Tensor:
        """Mean weights of the window's queries, over the query heads of a key head; infinite in the window."""
        length = heads.key.shape[1]
        window = heads.question or min(self.window, length // 2)
        scores = heads.key.new_full(heads.key.shape[:2], torch.inf, dtype=torch.float32)
        if not window:
            return scores
        logits = wide(heads.grouped)[:, :, -window:] @ wide(heads.key)[:, None].mT * heads.scale
        hidden = torch.ones(window, length, dtype=torch.bool, device=logits.device).triu(length - window + 1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)[..., :-window].mean(2)
        smooth = F.avg_pool1d(weights, self.kernel, 1, self.kernel // 2)
        scores[:, :-window] = smooth.mean(1)
        return scores
