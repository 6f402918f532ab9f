"""Attention in plain torch and as kernels round it: the yardsticks of their errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gistkit import Plan
from gistkit.ops import reference


def rounded_weights(query: Tensor, key: Tensor, value: Tensor, plan: Plan, **options: Any) -> tuple[Tensor, Tensor]:
    """The torch form that rounds its result and the weights, none of which is 1.

    Hopper's kernel weighs scores against those that were largest some steps ago.
    """
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    query, key, value = (t.to(torch.promote_types(dtype, torch.float32)) for t in (query, key, value))
    eye = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    weights, lse = reference.attention(query, key, eye, plan, **{**options, "return_lse": True})
    rounded = (1.37 * weights).to(dtype).to(value.dtype) / 1.37
    return (rounded @ value.repeat_interleave(group, 1)).to(dtype), lse


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    key_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The torch form with every tensor in the inputs' precision."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if key_bias is not None:
        scores = scores + key_bias[:, :, None].to(scores.dtype)
    scores = scores.masked_fill(~reference.dense_mask(plan)[:, None], -torch.inf)
    alive = (scores > -torch.inf).any(-1, keepdim=True)
    scores = scores.masked_fill(~alive, 0)
    lse = scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1)
    return scores.softmax(-1) * alive @ value, lse.masked_fill(~alive[..., 0], -torch.inf)


def check(got: list[Tensor], low: list[Tensor], exact: list[Tensor], epsilon: float, what: str = "") -> None:
    """No error beyond twice that of the same-precision torch form, where both are measured against fp64."""
    for i, (mine, torchs, true) in enumerate(zip(got, low, exact, strict=False)):
        assert mine.shape == true.shape, f"{what} {i}"
        if mine.numel() == 0:
            continue
        empty = true == -torch.inf
        assert torch.equal(mine == -torch.inf, empty), f"{what} {i}"
        mine, torchs, true = (t.double().masked_fill(empty, 0) for t in (mine, torchs, true))
        assert not mine.isnan().any(), f"{what} {i}: NaN"
        error, allowed = (mine - true).abs().max(), 2 * (torchs - true).abs().max() + epsilon * (1 + true.abs().max())
        assert error <= allowed, f"{what} {i}: error {error:.2e}, allowed {allowed:.2e}"
