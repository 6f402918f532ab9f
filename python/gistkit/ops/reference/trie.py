"""Ops of a transformer over the nodes of a trie, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def trie_mix(weights: Tensor, table: Tensor, base: Tensor, paths: Tensor) -> Tensor:
    """Same contract as `gistkit.ops.trie_mix`, from the paths alone."""
    on_path = paths >= 0
    rows = paths.clamp(min=0).long()
    symbol = rows.gather(1, on_path.sum(1, keepdim=True) - 1)[:, 0]
    taken = F.embedding(rows, table.flatten(1)).view(*rows.shape, *table.shape[1:])
    return F.embedding(symbol, base) + torch.einsum("nmh,nmhc->nc", weights * on_path[..., None], taken)


def ancestor_attention(
    query: Tensor, key: Tensor, value: Tensor, ancestors: Tensor, *, scale: float | None = None
) -> Tensor:
    """Same contract as `gistkit.ops.ancestor_attention`; gathers the keys and values of every query."""
    seen = (ancestors >= 0)[..., None]
    rows = ancestors.clamp(min=0).long()
    keys, values = (F.embedding(rows, x.flatten(1)).view(*rows.shape, *x.shape[1:]) for x in (key, value))
    scores = torch.einsum("nhd,nmhd->nmh", query, keys) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(1).masked_fill(~seen, 0)
    return torch.einsum("nmh,nmhd->nhd", weights, values)


def bias_gelu(x: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
    """Same contract as `gistkit.ops.bias_gelu`."""
    return F.gelu((x if scale is None else x * scale[:, None]) + bias, approximate="tanh")
