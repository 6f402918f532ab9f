"""Attention with a dense mask, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gistkit.layouts.plan import Plan


def dense_mask(plan: Plan) -> Tensor:
    """bool [B or 1, Nq, Nk]: True where the query row sees the key."""
    keys = torch.arange(plan.num_keys, device=plan.spans.device)
    start, end = plan.spans.unbind(-1)
    return ((keys >= start[..., None]) & (keys < end[..., None])).any(-2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    key_bias: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(query key^T scale + mask) value with all scores in memory; arguments as in `gistkit.attention`."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1]
    q = query.to(compute)
    k, v = (t.to(compute).repeat_interleave(group, dim=1) for t in (key, value))
    scores = q @ k.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if key_bias is not None:
        scores = scores + key_bias[:, :, None, :]
    if plan.num_keys == 0:
        alive = torch.zeros_like(scores.sum(-1, keepdim=True), dtype=torch.bool)
        shift = torch.zeros_like(scores.sum(-1, keepdim=True))
    else:
        scores = scores.masked_fill(~dense_mask(plan)[:, None], -torch.inf)
        shift = scores.detach().amax(-1, keepdim=True)
        alive = shift > -torch.inf
        shift = shift.masked_fill(~alive, 0)
    weights = torch.exp(scores - shift)
    total = weights.sum(-1, keepdim=True).masked_fill(~alive, 1)
    out = (weights / total @ v).to(query.dtype)
    if not return_lse:
        return out
    return out, (shift + torch.log(total)).masked_fill(~alive, -torch.inf).squeeze(-1)
