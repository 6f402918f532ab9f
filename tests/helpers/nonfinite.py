"""Attention over the keys that each row sees, gathered row by row in float64: what is not seen cannot take part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import gistkit
from gistkit import Plan, layouts

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_key_bias")
BAD = (math.nan, math.inf, -math.inf)
# Relative to the largest finite number of a result; the backward of halves has the result as it was rounded.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def gathered_attention(
    tensors: list[Tensor], grad_out: Tensor, grad_lse: Tensor, plan: Plan, softcap: float | None = None
) -> list[Tensor]:
    """out, lse and gradients of [query, key, value] or [query, key, value, key_bias]. A bias of -inf hides a key."""
    arrays: list[NDArray[np.float64]] = [t.detach().double().cpu().numpy() for t in (*tensors, grad_out, grad_lse)]
    query, key, value = arrays[:3]
    upstream, upstream_lse = arrays[-2:]
    batch, heads, queries, dim = query.shape
    group, keys = heads // key.shape[1], key.shape[2]
    given = arrays[3] if len(tensors) == 4 else np.zeros((1, 1, keys))
    bias = np.broadcast_to(given, (batch, heads, keys))
    spans = plan.spans.cpu().numpy()
    out, lse = np.zeros((batch, heads, queries, value.shape[3])), np.full((batch, heads, queries), -np.inf)
    by_query, by_key, by_value, by_bias = (np.zeros_like(x) for x in (query, key, value, bias))
    with np.errstate(all="ignore"):
        for b, h, i in np.ndindex(batch, heads, queries):
            seen = np.zeros(keys, bool)
            for begin, end in spans[b if len(spans) > 1 else 0, i]:
                seen[begin:end] = True
            j = np.flatnonzero(seen & (bias[b, h] != -np.inf))
            q, k, v = query[b, h, i], key[b, h // group, j], value[b, h // group, j]
            score, slope = (k * q).sum(-1) * dim**-0.5, np.ones(len(j))
            if softcap is not None:
                slope = 1 - np.tanh(score / softcap) ** 2
                score = softcap * np.tanh(score / softcap)
            score = score + bias[b, h, j]
            if (score == -np.inf).all():
                continue
            lse[b, h, i] = score.max() + np.log(np.exp(score - score.max()).sum())
            weight = np.exp(score - lse[b, h, i])
            out[b, h, i] = (weight[:, None] * v).sum(0)
            grad = upstream[b, h, i]
            delta = (out[b, h, i] * grad).sum() - upstream_lse[b, h, i]
            by_score = weight * ((v * grad).sum(-1) - delta)
            by_product = by_score * slope * dim**-0.5
            by_query[b, h, i] = (by_product[:, None] * k).sum(0)
            by_key[b, h // group, j] += by_product[:, None] * q
            by_value[b, h // group, j] += weight[:, None] * grad
            by_bias[b, h, j] += by_score
        for axis in range(2):
            if given.shape[axis] == 1:
                by_bias = by_bias.sum(axis, keepdims=True)
    results = [out, lse, by_query, by_key, by_value, by_bias]
    return [torch.from_numpy(x) for x in results[: 2 + len(tensors)]]


def run(
    tensors: list[Tensor], grad_out: Tensor, grad_lse: Tensor, plan: Plan, softcap: float | None = None
) -> list[Tensor]:
    """The same from the op."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    bias = inputs[3] if len(inputs) == 4 else None
    out, lse = gistkit.attention(*inputs[:3], plan, softcap=softcap, key_bias=bias, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], inputs, [grad_out, grad_lse])]


def check(got: list[Tensor], expected: list[Tensor], dtype: torch.dtype, what: str) -> None:
    """What is finite row by row is finite and near, and nothing else is."""
    for name, mine, true in zip(NAMES, got, expected, strict=False):
        mine = mine.double().cpu()
        empty, finite = (
            true == -math.inf if name == "lse" else torch.zeros_like(true, dtype=torch.bool),
            true.isfinite(),
        )
        assert torch.equal(mine.isfinite(), finite), (
            f"{what}: {name}: {(mine.isfinite() != finite).sum()} of {true.numel()}: "
            f"finite {(~mine.isfinite() & finite).sum()} times where only what is not seen is not"
        )
        assert torch.equal(mine[empty], true[empty]), f"{what}: {name}"
        if finite.any():
            error, size = (mine - true)[finite].abs().max(), true[finite].abs().max()
            assert error <= TOLERANCE[dtype] * (1 + size), f"{what}: {name}: error {error:.2e} of {size:.2e}"


def random_spans(queries: int, keys: int, spans: int, generator: torch.Generator, batch: int = 1) -> Plan:
    """Disjoint ascending spans of all lengths; about one row in eight sees nothing."""
    cuts = torch.randint(0, keys + 1, (batch, queries, 2 * spans), generator=generator, dtype=torch.int32)
    pairs = cuts.sort(-1).values.view(batch, queries, spans, 2)
    pairs[torch.rand(batch, queries, generator=generator) < 0.125] = keys
    pairs[pairs[..., 0] == pairs[..., 1]] = keys
    order = (2 * pairs[..., 0].long() + (pairs[..., 0] == pairs[..., 1])).argsort(dim=-1, stable=True)
    return Plan.from_spans(pairs.gather(2, order[..., None].expand_as(pairs)), keys)


PLANS: dict[str, Callable[[], Plan]] = {
    "causal": lambda: layouts.causal(130).compile(),
    "gist": lambda: layouts.gist(90, 5, 20).compile(),
    "avgpool": lambda: layouts.avgpool(90, 5, 20).compile(),
    "dodo": lambda: layouts.dodo(np.arange(120) % 5 == 4, 20).compile(),
    "icae": lambda: layouts.icae_encoder(90, 20, 4).compile(),
}


def spoiled(
    plan: Plan, dtype: torch.dtype, heads: int, key_heads: int, dim: int, dim_v: int, bias: bool, seed: int
) -> Iterator[tuple[str, list[Tensor], Tensor, Tensor]]:
    """Inputs and upstream gradients with a few numbers that are not finite: in each tensor alone, and in several."""
    g = torch.Generator().manual_seed(seed)
    queries, keys = plan.num_queries, plan.num_keys
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ((heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, dim_v), (heads, queries, dim_v))
    rows = {"query": 0, "key": 1, "value": 2, "grad_out": 3}
    for turn, names in enumerate(
        [["query"], ["key"], ["value"], ["grad_out"], ["key", "value"], ["value", "grad_out"]]
    ):
        tensors = [torch.randn(1, *shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
        grad_lse = torch.randn(1, heads, queries, generator=g, dtype=torch.float64).to(wide)
        for name in names:
            t = tensors[rows[name]]
            for count in range(2):
                h, row, d = (int(torch.randint(n, (1,), generator=g)) for n in t.shape[1:])
                # A row as a whole, or one number.
                t[0, h, row, slice(None) if count else slice(d, d + 1)] = BAD[(turn + seed + count) % 3]
        inputs = tensors[:3]
        if bias:
            key_bias = torch.randn(1, heads, keys, generator=g, dtype=torch.float64).to(wide)
            key_bias[..., ::7] = -math.inf
            inputs.append(key_bias)
        yield f"{' and '.join(names)}, seed {seed}", inputs, tensors[3], grad_lse
