"""Attention matching: biases and values with which the kept keys of a head give what all keys of the text give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries of a head, spread evenly over the passes, that a fit counts at most; a text has some for each query head.
QUERIES = 2048
# The weight of the original values and of no bias, in queries that read nothing but the text.
RIDGE, BIAS_RIDGE = 0.1, 1.0
STEPS = 100
# A bias multiplies the weight of a key at most by e^3.
LIMIT = 3.0


@dataclass(frozen=True, eq=False)
class References:
    """Queries of a layer that read a text.

    Args:
        query: [Hk, R, D], rotated, those of all query heads that read a key head.
        behind: [Hk, R], the log of the summed exponentials of what each query also reads, after the text.
        scale: factor of query key^T.
    """

    query: Tensor
    behind: Tensor
    scale: float

    @classmethod
    def together(cls, parts: Sequence[References]) -> References:
        """Those of several passes."""
        query, behind = (torch.cat(each, 1) for each in zip(*((one.query, one.behind) for one in parts), strict=True))
        return cls(query, behind, parts[0].scale)


def matched(references: References, heads: slice, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Biases [H, K] of the kept keys of some heads and their new values [H, K, Dv], both in float32 at least.

    Fast KV compaction via attention matching (Zweiger et al., arXiv 2602.16284), in closed form: weights exp(bias)
    with which the kept keys have the mass of all keys, and then the values with which they give what all keys give, for
    the queries. A query counts as much as it reads the text; both fits are ridge regressions, towards no bias and
    the original values, so that few queries change little.

    Args:
        references: of the layer.
        heads: the key heads.
        key, value: [H, n, D] and [H, n, Dv] of them, of all tokens.
        index: int64 [H, K], places of the kept keys, and then -1 in heads with fewer.
    """
    dtype = torch.promote_types(key.dtype, torch.float32)
    key, value = key.to(dtype), value.to(dtype)
    none, places = index < 0, index.clamp(min=0)
    # In place, as new memory takes longer than the arithmetic.
    weights = (references.query[heads].to(dtype) * references.scale) @ key.mT
    highest = weights.amax(-1, keepdim=True)
    total = weights.sub_(highest).exp_().sum(-1, keepdim=True)
    weights.div_(total)
    # The part of a query's attention that the text has.
    part = torch.sigmoid(highest + total.log() - references.behind[heads].to(dtype)[..., None])
    # A key that there is not has no weight, and then no bias and no change.
    seen = weights.gather(-1, places[:, None].expand(-1, weights.shape[1], -1)).masked_fill_(none[:, None], 0)
    weighted = seen * part
    gram, target = weighted.mT @ weighted, weighted.mT @ part
    factor = torch.ones_like(target)
    for _ in range(STEPS):
        # Multiplicative updates (Lee and Seung) of the least squares, which never leave the positive numbers.
        factor = factor * (target + BIAS_RIDGE) / (gram @ factor + BIAS_RIDGE * factor)
    bias = factor[..., 0].log().clamp(-LIMIT, LIMIT)
    seen = seen * bias.exp()[:, None]
    seen = seen / seen.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    own = value.take_along_dim(places[..., None], 1)
    missing = (weights @ value - seen @ own) * part
    seen = seen * part
    gram = seen.mT @ seen
    gram.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    # Without its check, for which the host would wait: with the ridge it is positive definite.
    root, _ = torch.linalg.cholesky_ex(gram)
    return bias, own + torch.cholesky_solve(seen.mT @ missing, root)
