"""Who takes part in the attention benchmark: gistkit, plain torch, SDPA and FlexAttention, and all of them decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_

import harness
import torch
from masks import PLANS, Shape, dense
from roof import beyond_cache_bytes
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit import Plan
from gistkit.ops import reference

LONGEST_DENSE = 8192
"""Most tokens for which SDPA with a dense mask takes part: beyond, a single call takes many seconds."""
MOST_SPANS = 4
"""Most spans a row that FlexAttention compares one by one; with more it looks into a dense mask, which is faster."""
MASK_CREATION = ("FlexAttention, mask creation alone", "FlexAttention, mask creation eager")


def block_mask(plan: Plan, compiled: bool, device: str = "cpu") -> Callable[[], BlockMask]:
    """A function that makes FlexAttention's block mask for a plan."""
    make = torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask
    seen = _by_spans(plan) if plan.spans.shape[2] <= MOST_SPANS else _by_dense_mask(plan)
    return lambda: make(seen, None, None, plan.num_queries, plan.num_keys, device=device)


def _by_spans(plan: Plan) -> Callable[..., Tensor]:
    spans = [(span[:, 0].contiguous(), span[:, 1].contiguous()) for span in plan.spans[0].unbind(1)]

    def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return reduce(or_, ((column >= start[row]) & (column < end[row]) for start, end in spans))

    return seen


def _by_dense_mask(plan: Plan) -> Callable[..., Tensor]:
    mask = dense(plan)

    def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask[row, column]

    return seen


def flex(plan: Plan, query: Tensor, key: Tensor, value: Tensor, slow: bool) -> dict[str, Callable[[], object]]:
    """Compiled FlexAttention with its block mask ready, the making of the mask, and both together.

    The mask is made by a compiled function, which takes a tenth of the time of the eager one; that one takes part too
    if `slow`.
    """
    make = block_mask(plan, compiled=True)
    blocks = make()
    compiled = torch.compile(flex_attention, fullgraph=True)
    gqa = query.shape[1] != key.shape[1]

    @torch.no_grad()
    def run(block_mask: BlockMask) -> Tensor:
        return compiled(query, key, value, block_mask=block_mask, enable_gqa=gqa)

    forms: dict[str, Callable[[], object]] = {
        "FlexAttention, compiled": lambda: run(blocks),
        MASK_CREATION[0]: make,
        "FlexAttention, with mask creation": lambda: run(make()),
    }
    if slow:
        forms[MASK_CREATION[1]] = block_mask(plan, compiled=False)
    return forms


def attention(
    shape: Shape, isas: Sequence[str], *, with_flex: bool, slow: bool, planned: bool = False
) -> harness.Forms:
    """The contenders of a case, ours first, once for each instruction set.

    Args:
        with_flex: FlexAttention takes part in forward cases; it has no backward on a CPU.
        slow: the plain torch form takes part, eager and compiled.
        planned: our form takes part with the making of its plan too, as where every batch has a mask of its own.
    """
    make, point = PLANS[shape.mask], shape.point
    plan = make(point.n)
    dtype = getattr(torch, point.dtype)

    def heads(count: int, rows: int) -> Tensor:
        return torch.randn(point.batch, count, rows, point.dim).to(dtype).requires_grad_(shape.backward)

    query = heads(point.heads, plan.num_queries)
    key, value = heads(point.key_heads, plan.num_keys), heads(point.key_heads, plan.num_keys)
    gqa = point.key_heads != point.heads

    def ours(isa: str, plan: Plan | None = plan) -> Tensor:
        gistkit.ops.cpu_isa(isa)
        return gistkit.attention(query, key, value, make(point.n) if plan is None else plan)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference.attention(query, key, value, plan)

    found: dict[str, Callable[[], object]] = {f"gistkit {isa}": partial(ours, isa) for isa in isas}
    if planned:
        found |= {f"gistkit, with plan creation, {isa}": partial(ours, isa, None) for isa in isas}
    if point.n <= LONGEST_DENSE:
        mask = dense(plan)
        found["SDPA, dense mask"] = lambda: sdpa(query, key, value, attn_mask=mask, enable_gqa=gqa)
    if shape.mask == "causal":
        found["SDPA, is_causal"] = lambda: sdpa(query, key, value, is_causal=True, enable_gqa=gqa)
    if slow:
        compiled = torch.compile(plain, fullgraph=True)
        found["plain torch, eager"] = lambda: plain(query, key, value)
        found["plain torch, compiled"] = lambda: compiled(query, key, value)
    if not shape.backward:
        return found | (flex(plan, query, key, value, slow) if with_flex else {})
    grad = torch.randn(point.batch, point.heads, plan.num_queries, point.dim).to(dtype)
    return {
        who: lambda form=form: torch.autograd.grad(form(), (query, key, value), grad) for who, form in found.items()
    }


def decode(keys: int, dtype: torch.dtype, isas: Sequence[str], queries: int = 1) -> harness.Forms:
    """The last `queries` tokens of `keys` over the cache of all, 32 query heads, 8 key heads, head dim 128.

    A long cache is one of several that take turns, as those of a model's layers do, so that the last cache of the
    processor does not hold it.
    """
    layers = decode_layers(keys, dtype)
    query = torch.randn(1, 32, queries, 128).to(dtype)
    first = torch.randn(1, 8, keys, 128).to(dtype), torch.randn(1, 8, keys, 128).to(dtype)
    caches = [first, *((first[0].clone(), first[1].clone()) for _ in range(layers - 1))]
    ends = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32)
    plan = Plan.from_spans(torch.stack([torch.zeros_like(ends), ends], -1)[:, None], keys)
    mask = None if queries == 1 else dense(plan)
    turn = 0

    def following() -> tuple[Tensor, ...]:
        nonlocal turn
        turn = (turn + 1) % layers
        return caches[turn]

    def ours(isa: str) -> object:
        gistkit.ops.cpu_isa(isa)
        return gistkit.attention(query, *following(), plan)

    return {f"gistkit {isa}": partial(ours, isa) for isa in isas} | {
        "SDPA": lambda: sdpa(query, *following(), attn_mask=mask, enable_gqa=True),
        "sum of the cache": lambda: [part.sum() for part in following()],
    }


def decode_bytes(keys: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values that a decoding step reads."""
    return 2 * 8 * keys * 128 * dtype.itemsize


def decode_layers(keys: int, dtype: torch.dtype) -> int:
    """How many caches take turns: enough to pass the processor's last cache, or one where the cache is short."""
    return 1 if keys <= 1024 else max(2, -(-beyond_cache_bytes() // decode_bytes(keys, dtype)))
