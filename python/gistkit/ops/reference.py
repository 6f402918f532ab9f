"""The ops in plain torch, oracle of the tests and baseline of the benchmarks.

Signatures are the same, without options that choose between kernels (`deterministic`). Those of the trie
take the rows of their Links.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.layouts.plan import Plan


def dense_mask(plan: Plan) -> Tensor:
    """bool [B or 1, Nq, Nk]: True where the query row sees the key."""
    start, end = plan.spans.clamp(0, plan.num_keys).long().unbind(-1)
    # How many spans begin and end at a key: a mask for each span would take as many times the memory.
    steps = plan.spans.new_zeros((*start.shape[:2], plan.num_keys + 1))
    one = steps.new_ones(1).expand_as(start)
    steps.scatter_add_(-1, start, one).scatter_add_(-1, end.maximum(start), -one)
    return steps[..., :-1].cumsum(-1, dtype=steps.dtype) > 0


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


def window_pool(
    key: Tensor,
    value: Tensor | None = None,
    *,
    windows: int | Tensor,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same contract as `gistkit.ops.window_pool`; sums by scatter_add, the rotation by `rope`."""
    tokens = key.shape[-2]
    if isinstance(windows, Tensor):
        offsets = (windows if windows.dim() == 2 else windows[None]).contiguous()
    else:
        offsets = torch.arange(0, tokens + windows, windows, device=key.device).clamp(max=tokens)[None]
    keys = _means(key, offsets)
    if positions is not None and inv_freq is not None:
        none = keys.new_empty((keys.shape[0], 0, *keys.shape[2:]))
        keys, _ = rope(keys, none, positions, inv_freq, scaling=scaling, interleaved=interleaved)
    if value is None:
        return keys.to(key.dtype)
    return keys.to(key.dtype), _means(value, offsets).to(value.dtype)


def _means(x: Tensor, offsets: Tensor) -> Tensor:
    """In the precision of the sums."""
    heads = (x if x.dim() == 4 else x[:, None]).to(torch.promote_types(x.dtype, torch.float32))
    batch, _, tokens, _ = heads.shape
    count = offsets.shape[1] - 1
    # Rows 0 and W + 1 take the tokens before the first window and after the last.
    row = torch.searchsorted(offsets, torch.arange(tokens, device=x.device).repeat(len(offsets), 1), right=True)
    sums = heads.new_zeros((*heads.shape[:2], count + 2, heads.shape[3]))
    sums = sums.scatter_add(2, row[:, None, :, None].expand(batch, *heads.shape[1:]), heads)
    means = sums[:, :, 1:-1] / offsets.diff().clamp(min=1)[:, None, :, None]
    return means if x.dim() == 4 else means[:, 0]


def trie_mix(weights: Tensor, table: Tensor, base: Tensor, paths: Tensor) -> Tensor:
    """Same contract as `gistkit.ops.trie_mix`, from the paths only."""
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
