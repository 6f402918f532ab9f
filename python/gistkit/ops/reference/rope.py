"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Same contract as `gistkit.ops.rope`; differentiable in every floating argument.

    Angles are formed in float64, cosines and sines rounded once to the precision of the rotation (float32, or float64
    for float64 heads).
    """
    positions = positions.reshape((1,) * (3 - positions.dim()) + positions.shape).double()
    inv_freq = inv_freq.reshape((1,) * (3 - inv_freq.dim()) + inv_freq.shape).double()
    angle = torch.einsum("abn,haf->bhnf", positions, inv_freq)
    compute = torch.promote_types(query.dtype, torch.float32)
    cos, sin = (angle.cos() * scaling).to(compute), (angle.sin() * scaling).to(compute)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary = 2 * cos.shape[-1]
    x, rest = heads[..., :rotary].to(cos.dtype), heads[..., rotary:]
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated.to(heads.dtype), rest), dim=-1)
