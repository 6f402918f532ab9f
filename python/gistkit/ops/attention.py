"""Attention over row spans: the public function, its checks, fake kernels and autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gistkit import _gpu
from gistkit.layouts.lists import TILE_KEYS, TILE_QUERIES, TileLists, lists_on, made_on_gpu, version_of
from gistkit.layouts.plan import Plan
from gistkit.ops._autograd import differentiable, once
from gistkit.ops._modes import autocast
from gistkit.ops._private import autocasts, below_autograd, levels, transforms
from gistkit.ops.rope import DTYPES, whole_rows

_ATTENTION = torch.ops.gistkit.attention.default
_ATTENTION_BACKWARD = once(torch.ops.gistkit.attention_backward.default, "attention")
_TILES = torch.ops.gistkit.attention_tiles.default

MAX_HEAD_DIM = 256


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
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(query key^T scale + mask) value, with the plan's spans as the mask. Exact; no mask is stored.

    Differentiable once in query, key, value and key_bias, through the result and lse; not in forward mode. Under
    `torch.autocast` float32 and half inputs are cast like those of scaled_dot_product_attention. Deterministic: the
    result has the same bits for any number of threads, and on all GPUs of one model (with few queries, the split of the
    keys depends on the number of multiprocessors). A call on a GPU does not synchronise: `Plan.to` makes the lists of
    visible tiles, and a plan made on the GPU gets its lists in its first call. That first call synchronises if the mask
    has more than 2**24 tiles of 128 x 64, visible or not, or more than 2**17 of them on a side, summed over the plan's
    sequences. It then copies the spans to the CPU and makes lists there, whose length is that of the visible tiles.

    Args:
        query: [B, Hq, Nq, Dqk], float32, float64, bfloat16 or float16; sums are formed in float32 (float64 for
            float64). With native bfloat16 or float16 matmuls (GPUs, AMX, AVX-512's dot products), weights and their
            gradients are rounded to that dtype first. Errors are then within twice those of plain torch in that dtype,
            and larger than those of a float32 result rounded once, most of all in gradients of values. Any strides with
            a contiguous last dimension; another layout is copied first.
        key: [B, Hk, Nk, Dqk] of query's dtype; Hq is a multiple of Hk, and query head h uses key head h // (Hq / Hk).
        value: [B, Hk, Nk, Dv] of query's dtype. Dqk and Dv are 1 to 256 and need not be equal.
        plan: spans for Nq queries and Nk keys, for B sequences or one for all of them.
        scale: factor on query key^T; default Dqk ** -0.5.
        softcap: the scaled logit x becomes softcap * tanh(x / softcap) before key_bias is added; > 0. Default: none.
        key_bias: [B or 1, Hq or 1, Nk], float32 (float64 for float64 inputs), added to the logits of a key. A key with
            -inf is hidden. For bfloat16 and float16 inputs its gradient includes the rounding of the result. On a GPU
            lse, rounded, enters the gradients: biases of 10^4 and more on all that a row sees leave errors of 10^-3.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: False allows sums of gradients in any order where that is faster, on GPUs of compute capability
            9.0. Their bits then differ from call to call.

    Returns:
        out [B, Hq, Nq, Dv] of query's dtype, laid out as [B, Nq, Hq, Dv] in memory, so that `out.transpose(1,
        2).flatten(2)` copies nothing. With return_lse the pair (out, lse): lse [B, Hq, Nq], natural logarithm, float32
        (float64 for float64 inputs). A row that sees no key has out 0, lse -inf and no gradient. A NaN or infinity in a
        key, value, query or upstream gradient reaches only the rows that see it and the gradients of what these rows
        see.

    Raises:
        TypeError: a dtype is not supported or the dtypes differ.
        ValueError: shapes, devices, head counts or the plan's lengths do not fit; softcap is not positive, or it,
            scale or scale / softcap are beyond float32 (float64 for float64 inputs).
        RuntimeError: under `torch.compile` or CUDA graph capture, a plan made on a GPU has no lists yet and exceeds
            these bounds. Call `Plan.to`, or attention once, before.
    """
    if autocasts():
        query, key, value = autocast(query, key, value)
        (key_bias,) = autocast(key_bias, dtype=torch.float32)
    if is_compiling():
        check_attention(query, key, value, plan, key_bias, scale, softcap)
        query, key, value = map(whole_rows, (query, key, value))
        out, lse = _call(query, key, value, plan, key_bias, scale, softcap, deterministic)
        return (out, lse) if return_lse else out
    try:
        out, lse = _call(query, key, value, plan, key_bias, scale, softcap, deterministic)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        # The op refuses what it cannot read; which argument that is, and whether a copy helps, is found out only then.
        check_attention(query, key, value, plan, key_bias, scale, softcap)
        given = query, key, value
        query, key, value = map(whole_rows, given)
        if all(copy is t for copy, t in zip((query, key, value), given, strict=True)):
            raise
        out, lse = _call(query, key, value, plan, key_bias, scale, softcap, deterministic)
    return (out, lse) if return_lse else out


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """`attention` of arguments that may be wrong in any way, which then is an error without their names."""
    spans, tiles = plan.spans, None
    if _gpu.on_gpu(spans):
        check_attention(query, key, value, plan, key_bias, scale, softcap)
        tensors = [t for t in (query, key, value, key_bias) if t is not None]
        spans, tiles = _lists(plan, torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    # What the op does not know, or takes for something else.
    _, heads, keys, dim = key.shape
    if 0 in (heads, dim) or keys != plan.num_keys or (softcap is not None and softcap <= 0):
        raise ValueError("attention: expected key heads and dims, a plan of key's rows and a positive softcap")
    if key_bias is not None:
        key_bias = whole_rows(key_bias)
    scale = dim**-0.5 if scale is None else float(scale)
    softcap = 0.0 if softcap is None else float(softcap)
    # In place of `unrecorded`, whose Python a call of some microseconds feels.
    if torch.is_grad_enabled() or levels._current_level >= 0 or transforms() or is_compiling():
        return _attend(  # type: ignore[no-any-return]
            query, key, value, spans, key_bias, scale, softcap, tiles, deterministic
        )
    with below_autograd():
        return _ATTENTION(query, key, value, spans, key_bias, scale, softcap, tiles)  # type: ignore[no-any-return]


def _lists(plan: Plan, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The plan's spans and lists of tiles, which are made for it where they can be kept. Without, the op makes some."""
    lists = plan._lists
    if is_compiling():
        return (plan.spans, None) if lists is None else (lists.spans, lists.tiles)
    spans = plan.spans
    kept = lists if lists is not None and lists.serve(spans, gradient) else None
    # A graph outlives lists that a later call may replace: it takes those that came with the plan, or makes its own.
    if (kept is None or kept.stream is not None) and _gpu.capturing():
        return spans, None
    if kept is None and not made_on_gpu(spans, plan.num_keys, gradient):
        kept = lists_on(spans.cpu(), plan.num_keys, spans)
        plan._keep(kept)
    if kept is None:
        ordered, tiles = _TILES(spans, plan.num_keys, gradient)
        kept = TileLists(spans, version_of(spans), ordered, tiles, _gpu.stream_of(spans))
        plan._keep(kept)
    return kept.spans, kept.tiles


def keep_lists(plan: Plan) -> None:
    """Makes the tile lists of a plan on a GPU for all later calls of attention, also during graph capture.

    A plan made inside a graph must not be used outside it.
    """
    if _gpu.on_gpu(plan.spans):
        ordered, tiles = _TILES(plan.spans, plan.num_keys, False)
        plan._keep(TileLists(plan.spans, version_of(plan.spans), ordered, tiles))


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each of them. Differentiable.

    Args:
        out_a: [..., N, D], the result over the first set.
        lse_a: [..., N], its log-sum-exp; -inf where a row saw no key of that set.
        out_b: like out_a, over the second set.
        lse_b: like lse_a.

    Returns:
        (out, lse) over both sets, as `attention(..., return_lse=True)` gives them. Out has out_a's dtype.

    Raises:
        ValueError: the shapes do not fit.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"merge_attention: lse_{name}: expected out_{name}'s shape without the last dimension, "
                f"{tuple(out.shape[:-1])}, got {tuple(lse.shape)}"
            )
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"merge_attention: out_b: expected out_a's shape {tuple(out_a.shape)}, got {tuple(out_b.shape)}"
        )
    shift = torch.maximum(lse_a, lse_b).detach()
    shift = shift.masked_fill(shift == -torch.inf, 0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    empty = total == 0
    total = total.masked_fill(empty, 1)
    out = out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]
    return out.to(out_a.dtype), (shift + torch.log(total)).masked_fill(empty, -torch.inf)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> None:
    """Raises the errors that `attention` lists."""
    _check_tensors(query, key, value)
    _check_plan(plan, query, key)
    if key_bias is not None:
        _check_key_bias(key_bias, query, key)
    # While compiling they may be symbols.
    if is_compiling():
        return
    # Kernels hold them in powers of two or of e.
    dtype = _accumulation_dtype(query.dtype)
    most = torch.finfo(dtype).max * math.log(2)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if not abs(factor) <= most:
        raise ValueError(f"attention: scale: expected a finite number of {dtype}, got {scale}")
    if softcap is not None and not (0 < softcap <= most and abs(factor) <= softcap * most):
        raise ValueError(
            f"attention: softcap: expected None or a positive number that {dtype} holds, as it holds scale / softcap, "
            f"got {softcap}"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"attention: {name}: expected a torch tensor, got {type(t).__name__}")
    # Attributes are read once: on a call of a few microseconds they count.
    dtype, device, batch = query.dtype, query.device, query.shape[0] if query.dim() else 0
    for name, t in (("query", query), ("key", key), ("value", value)):
        shape = t.shape
        if len(shape) != 4:
            raise ValueError(f"attention: {name}: expected 4 dimensions [B, H, N, D], got shape {tuple(shape)}")
        if t.dtype != dtype:
            raise TypeError(f"attention: {name}: expected query's dtype {dtype}, got {t.dtype}")
        if t.device != device:
            raise ValueError(f"attention: {name}: expected query's device {device}, got {t.device}")
        if not 1 <= shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"attention: {name}: expected a head dim from 1 to {MAX_HEAD_DIM}, got {shape[3]}")
        if shape[0] != batch:
            raise ValueError(f"attention: {name}: expected query's batch size {batch}, got {shape[0]}")
    if dtype not in DTYPES:
        raise TypeError(
            f"attention: query: expected dtype {', '.join(str(d) for d in DTYPES[:-1])} or {DTYPES[-1]}, got {dtype}"
        )
    _, query_heads, _, dim = query.shape
    _, key_heads, keys, key_dim = key.shape
    if key_dim != dim:
        raise ValueError(f"attention: key: expected query's head dim {dim}, got {key_dim}")
    if value.shape[1:3] != (key_heads, keys):
        raise ValueError(
            f"attention: value: expected key's heads and length {(key_heads, keys)}, got {tuple(value.shape[1:3])}"
        )
    if not key_heads or not query_heads or query_heads % key_heads:
        raise ValueError(f"attention: query: expected a multiple of key's {key_heads} heads, got {query_heads} heads")


def _check_plan(plan: Plan, query: Tensor, key: Tensor) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"attention: plan: expected a gistkit.Plan, got {type(plan).__name__}")
    _check_spans(plan.spans, query)
    if plan.num_keys != key.shape[2]:
        raise ValueError(f"attention: plan: expected one for key's {key.shape[2]} rows, got one for {plan.num_keys}")


def _check_spans(spans: Tensor, query: Tensor) -> None:
    shape, batch, rows = spans.shape, query.shape[0], query.shape[2]
    if len(shape) != 4 or shape[3] != 2 or spans.dtype != torch.int32 or not spans.is_contiguous():
        raise ValueError(
            f"attention: plan.spans: expected a contiguous int32 [B or 1, Nq, S, 2], got {spans.dtype} {tuple(shape)}"
        )
    if shape[1] != rows:
        raise ValueError(f"attention: plan: expected one for query's {rows} rows, got one for {shape[1]}")
    if shape[0] != 1 and shape[0] != batch:
        raise ValueError(f"attention: plan: expected one for 1 or {batch} sequences, got one for {shape[0]}")
    if spans.device != query.device:
        raise ValueError(f"attention: plan: expected query's device {query.device}, got {spans.device}")


def _check_key_bias(key_bias: Tensor, query: Tensor, key: Tensor) -> None:
    if not isinstance(key_bias, Tensor):
        raise TypeError(f"attention: key_bias: expected a torch tensor or None, got {type(key_bias).__name__}")
    expected = _accumulation_dtype(query.dtype)
    if key_bias.dtype != expected:
        raise TypeError(
            f"attention: key_bias: expected dtype {expected} for {query.dtype} inputs, got {key_bias.dtype}"
        )
    batch, heads, keys = query.shape[0], query.shape[1], key.shape[2]
    shape = key_bias.shape
    if len(shape) != 3 or (shape[0] not in (1, batch)) or (shape[1] not in (1, heads)) or shape[2] != keys:
        raise ValueError(
            f"attention: key_bias: expected shape [{batch} or 1, {heads} or 1, {keys}], got {tuple(shape)}"
        )
    if key_bias.device != query.device:
        raise ValueError(f"attention: key_bias: expected query's device {query.device}, got {key_bias.device}")


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("gistkit::attention")
def _fake(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    if not is_compiling():
        # Where nothing has values, shapes are all that can be refused.
        _check_tensors(query, key, value)
        _check_spans(spans, query)
    batch, heads, rows = query.shape[:3]
    out = query.new_empty((batch, rows, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, rows), dtype=_accumulation_dtype(query.dtype))


def _empty_gradient(t: Tensor) -> Tensor:
    batch, heads, rows, dim = t.shape
    if t.stride(1) < t.stride(2):
        return t.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    return t.new_empty((batch, heads, rows, dim))


@torch.library.register_fake("gistkit::attention_tiles")
def _tiles_fake(spans: Tensor, num_keys: int, both: bool) -> tuple[Tensor, Tensor]:
    batch, rows, _, _ = spans.shape
    query_tiles, key_tiles = (
        torch.sym_max(1, (n + size - 1) // size) for n, size in ((rows, TILE_QUERIES), (num_keys, TILE_KEYS))
    )
    width = 4 * batch * torch.sym_max(query_tiles, key_tiles) + batch * query_tiles * key_tiles
    return torch.empty_like(spans), spans.new_empty((2 if both else 1, (width + 1) // 2 * 2))


@torch.library.register_fake("gistkit::attention_backward")
def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    key_bias: Tensor | None,
    scale: float,
    softcap: float,
    need_key_bias: bool,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias_shape = (query.shape[0], query.shape[1], key.shape[2]) if need_key_bias else (0,)
    grad_key_bias = query.new_empty(bias_shape, dtype=_accumulation_dtype(query.dtype))
    return _empty_gradient(query), _empty_gradient(key), _empty_gradient(value), grad_key_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, spans, key_bias, ctx.scale, ctx.softcap, tiles, ctx.deterministic = inputs
    ctx.save_for_backward(query, key, value, *output, spans, key_bias, tiles)
    # Most calls do not use lse: its gradient then has no tensor of zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, spans, key_bias, tiles = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_key_bias = key_bias is not None and ctx.needs_input_grad[4]
    grad_query, grad_key, grad_value, grad_key_bias = _ATTENTION_BACKWARD(
        whole_rows(grad_out),
        None if grad_lse is None else grad_lse.contiguous(),
        query,
        key,
        value,
        out,
        lse,
        spans,
        key_bias,
        ctx.scale,
        ctx.softcap,
        need_key_bias,
        tiles,
        ctx.deterministic,
    )
    if need_key_bias:
        # One dimension at a time: a single sum over both may depend on the number of threads.
        for d in (0, 1):
            if key_bias.shape[d] == 1:
                grad_key_bias = grad_key_bias.sum(d, keepdim=True)
    return grad_query, grad_key, grad_value, None, grad_key_bias if need_key_bias else None, None, None, None, None


_attend = differentiable(_ATTENTION, _backward, _setup_context)
