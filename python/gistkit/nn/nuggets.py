"""Nuggets: a scorer of tokens, and the selection of tokens by their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gistkit.common.checks import check_float, placed


class NuggetScorer(nn.Module):
    """Scores how well a token can represent those before it: a feed-forward network of two layers (Dodo, Equation 6).

    Args:
        hidden_size: d of the hidden states that are scored, those of a low layer of the model.
        inner_size: width of the hidden layer; None: d.
    """

    def __init__(self, hidden_size: int, inner_size: int | None = None) -> None:
        super().__init__()
        inner_size = hidden_size if inner_size is None else inner_size
        self.up = nn.Linear(hidden_size, inner_size)
        self.down = nn.Linear(inner_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores [.., N] of hidden states [.., N, d], float32, or float64 where the scorer is."""
        # Scores are compared with each other: under autocast their rounding would decide.
        with torch.autocast(hidden.device.type, enabled=False):
            scores = self.down(torch.relu(self.up(hidden.to(self.up.weight.dtype))))[..., 0]
        return scores if scores.dtype == torch.float64 else scores.float()


@dataclass(frozen=True, eq=False)
class Nuggets:
    """Selected tokens of each row of a batch.

    Args:
        index: int64 [B, K], in the order of the text; shorter rows repeat their last nugget.
        counts: nuggets of each row, K at most.
    """

    index: Tensor
    counts: tuple[int, ...]


def top_nuggets(scores: Tensor, ratio: float, mask: Tensor | None = None) -> Nuggets:
    """The k = ceil(n / ratio) tokens with the highest scores in each row; the last token is always one of them.

    Ties go to the earlier token. The call waits for the device, because NaN and rows of only padding are refused.

    Args:
        scores: [B, N] floating point, without NaN where the mask is True.
        ratio: tokens a nugget, at least 1; a ratio above a row's length keeps only the last token.
        mask: bool [B, N], False on padding, anywhere in a row; each row has at least one token. None: no padding.

    Paper: Dodo, Equations 14 and 15; the last token in footnote 4.
    """
    check_float("ratio", ratio, 1)
    mask = _checked(scores, mask)
    lengths = [scores.shape[1]] * scores.shape[0] if mask is None else mask.sum(1).tolist()
    counts = tuple(math.ceil(length / ratio) for length in lengths)
    # No score is below padding's, and none above the last token's.
    limits = torch.finfo(scores.dtype)
    ranked = scores.detach().clamp(limits.min, limits.max)
    ranked = ranked if mask is None else ranked.where(mask, -math.inf)
    ranked = ranked.masked_fill(_last(scores, mask), math.inf)
    order = ranked.argsort(dim=1, descending=True, stable=True)[:, : max(counts)]
    if min(counts) < order.shape[1]:
        # What comes first in the ranking is the last token, which no other index is beyond.
        extra = torch.arange(order.shape[1], device=order.device) >= placed(counts, order.device)[:, None]
        order = torch.where(extra, order[:, :1], order)
    return Nuggets(order.sort(1).values, counts)


def nuggets_above(scores: Tensor, threshold: float, mask: Tensor | None = None) -> Tensor:
    """bool [B, N]: the tokens whose score is above a threshold (Dodo, Equation 8).

    Args:
        scores, mask: as in `top_nuggets`.
        threshold: Lambda, as `threshold_for` finds it.
    """
    if math.isnan(threshold):
        raise ValueError("threshold: expected a number, got NaN")
    mask = _checked(scores, mask)
    # In float32 a threshold between two scores would be rounded to one of them.
    chosen = scores.detach().double() > threshold
    return chosen if mask is None else chosen & mask


def threshold_for(scores: Tensor, ratio: float) -> float:
    """The threshold Lambda that one in `ratio` of these scores exceeds: their quantile at 1 - 1 / ratio.

    Args:
        scores: of tokens of sampled text, any shape, at least one, without NaN.
        ratio: tokens a nugget, at least 1. With 1 all scores are above it.

    Paper: Dodo, Section 2.2.
    """
    check_float("ratio", ratio, 1)
    if not scores.numel() or not scores.is_floating_point():
        raise ValueError(f"scores: expected numbers of at least one token, got {scores.dtype} {tuple(scores.shape)}")
    if bool(scores.isnan().any()):
        raise ValueError("scores: expected numbers, got NaN")
    ranked = scores.detach().flatten().sort(descending=True).values
    nuggets = max(1, round(len(ranked) / ratio))
    # Equal scores are on one side together: on that which makes the number nearer to what is asked for.
    last = ranked[nuggets - 1]
    fewer, more = int((ranked > last).sum()), int((ranked >= last).sum())
    nuggets = fewer if nuggets - fewer < more - nuggets else more
    if nuggets in (0, len(ranked)):
        return -math.inf if nuggets else float(last)
    # Between two scores, so that rounding of either decides nothing.
    limits = torch.finfo(scores.dtype)
    above, below = ranked[nuggets - 1 : nuggets + 1].double().clamp(limits.min, limits.max).tolist()
    middle = above / 2 + below / 2
    return middle if middle < above else below


def straight_through(scores: Tensor) -> Tensor:
    """scores - scores.detach(): zeros whose gradient is that of the scores (Dodo, Section 2.4).

    As the attention's `key_bias` it leaves the logits as they are and gives a score the sum, over queries, heads and
    layers, of the gradients of its key's logits. The queries are those that read the key as a nugget: a key that some
    queries read as a recent token needs a second copy for the others (`MixedResolution.hidden`).
    """
    return scores - scores.detach()


def rule_scores(rule: str, ids: Tensor, indices: Tensor, ratio: int, delimiters: tuple[int, ...]) -> Tensor:
    """Scores of tokens by a rule that learns nothing: a token's score depends only on the token and its index.

    Args:
        rule: "strided": every `ratio`-th token; "random": any tokens, the same ones for the same text; "delimiters":
            tokens of `delimiters`, at random among them, then other tokens; "none": no token.
        ids, indices: int64 of one shape, tokens and their indices in the context, from 0.
        ratio: tokens for each nugget.
        delimiters: token ids.

    Returns:
        float32 of that shape, in [0, 2).
    """
    if rule == "none":
        return torch.zeros(ids.shape, device=ids.device)
    if rule == "strided":
        return ((indices + 1) % ratio == 0).float()
    score = _uniform(ids, indices)
    if rule == "delimiters":
        score = score + torch.isin(ids, placed(delimiters, ids.device))
    return score


def rule_threshold(rule: str, ratio: int) -> float | None:
    """The threshold for a rule's scores; None if sampled text has to determine it."""
    return {"strided": 0.5, "random": math.nextafter(1 - 1 / ratio, -1), "none": math.inf}.get(rule)


def _uniform(ids: Tensor, indices: Tensor) -> Tensor:
    """Pseudo-random numbers in [0, 1) from a token and its index (the finaliser of MurmurHash3)."""
    mixed = ids * 0x9E3779B1 + indices * 0x85EBCA77 + 1
    for factor in (0x7F51AFD7ED558CCD - 2**62, 0x44CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> 33 & 0x7FFFFFFF)) * factor
    return (mixed >> 29 & 2**24 - 1).float() / 2**24


def _last(scores: Tensor, mask: Tensor | None) -> Tensor:
    """bool [B or 1, N]: the last token of each row."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    if mask is None:
        return (columns == scores.shape[1] - 1)[None]
    return columns == columns.where(mask, -1).amax(1, keepdim=True)


def _checked(scores: Tensor, mask: Tensor | None) -> Tensor | None:
    if not isinstance(scores, Tensor) or scores.dim() != 2 or not scores.numel() or not scores.is_floating_point():
        raise ValueError(f"scores: expected floating point [B, N] with B, N >= 1, got {_described(scores)}")
    nan = scores.detach().isnan()
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != scores.shape or mask.dtype != torch.bool:
            raise ValueError(f"mask: expected bool {list(scores.shape)} as scores has, got {_described(mask)}")
        nan = nan & mask
        if not bool(mask.any(1).all()):
            row = int((~mask.any(1)).nonzero()[0])
            raise ValueError(f"mask: expected at least one token in each row, got only padding in row {row}")
    if bool(nan.any()):
        row, column = nan.nonzero()[0].tolist()
        raise ValueError(f"scores: expected numbers, got NaN at token {column} of row {row}")
    return mask


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
