"""Attention with dropout, for training. It is dense, unlike `attention`, which stores no mask or weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.layouts.plan import Plan
from gistkit.ops._modes import autocast
from gistkit.ops._private import autocasts
from gistkit.ops.attention import check_attention
from gistkit.ops.reference import dense_mask


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    *,
    dropout: float,
    scale: float | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """`attention` with dropout: each weight is 0 with probability `dropout`, else divided by 1 - dropout.

    Computed by torch's scaled_dot_product_attention with the plan as a dense mask [B or 1, 1, Nq, Nk], or with
    `key_bias` [B or 1, H, Nq, Nk]: gistkit's kernels have no dropout. On the CPU torch also stores the weights [B, H,
    Nq, Nk] for backward; its GPU kernels need not. Dropout masks use torch's random numbers.

    Args:
        query, key, value, plan, scale, key_bias: as of `attention`.
        dropout: at least 0 and below 1.

    Returns:
        [B, Hq, Nq, Dv]; 0 where a query sees no key.

    Raises:
        ValueError: dropout out of range.
        TypeError, ValueError: as of `attention`.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"attention_with_dropout: dropout: expected at least 0 and below 1, got {dropout}")
    if autocasts():
        query, key, value = autocast(query, key, value)
        (key_bias,) = autocast(key_bias, dtype=torch.float32)
    check_attention(query, key, value, plan, key_bias, scale, None)
    visible = dense_mask(plan)[:, None]
    mask = visible
    if key_bias is not None and plan.num_keys:
        mask = key_bias[:, :, None].masked_fill(~visible, -torch.inf)
        highest = mask.detach().amax(-1, keepdim=True)
        # Relative to each row's highest: of half precision, little is left of a difference of large biases.
        mask = (mask - highest.masked_fill(highest == -torch.inf, 0)).to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return out.masked_fill(~visible.any(-1, keepdim=True), 0)
