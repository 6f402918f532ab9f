"""Attention as kernels round it: a yardstick of their errors."""

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
