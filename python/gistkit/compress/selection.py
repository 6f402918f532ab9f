"""Rules that score tokens, so that the highest are nuggets: Dodo's learned one, and what it is measured against."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["learned", "strided", "random", "delimiters", "none"]
RULES = ("learned", "strided", "random", "delimiters", "none")
_MASK = 2**24 - 1


def rule_scores(rule: Rule, ids: Tensor, places: Tensor, ratio: int, delimiters: tuple[int, ...]) -> Tensor:
    """Scores of a rule that is not learned; each token's depends on itself and its place alone.

    Args:
        rule: "strided": every `ratio`-th token; "random": any, the same ones whenever the text is the same;
            "delimiters": tokens of `delimiters`, and at random among them or beyond them; "none": no token.
        ids, places: int64 of one shape, tokens and their places in the context, from 0.
        ratio: tokens a nugget.
        delimiters: token ids.

    Returns:
        float32 of that shape, in [0, 2).
    """
    if rule == "none":
        return torch.zeros(ids.shape, device=ids.device)
    if rule == "strided":
        return ((places + 1) % ratio == 0).float()
    score = _uniform(ids, places)
    if rule == "delimiters":
        score = score + torch.isin(ids, torch.tensor(delimiters, device=ids.device))
    return score


def rule_threshold(rule: Rule, ratio: int) -> float | None:
    """The threshold that a rule's selected tokens are above; None where sampled text has to tell."""
    return {"strided": 0.5, "random": math.nextafter(1 - 1 / ratio, -1), "none": math.inf}.get(rule)


def _uniform(ids: Tensor, places: Tensor) -> Tensor:
    """Numbers in [0, 1) that look drawn, by a token and its place (the finaliser of MurmurHash3)."""
    mixed = ids * 0x9E3779B1 + places * 0x85EBCA77 + 1
    for factor in (0x7F51AFD7ED558CCD - 2**62, 0x44CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> 33 & 0x7FFFFFFF)) * factor
    return (mixed >> 29 & _MASK).float() / (_MASK + 1)
