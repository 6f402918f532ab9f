"""Ops of a transformer over the nodes of a trie: mixtures along paths, attention to ancestors, and gelu.

They have no half precision: under `torch.autocast` half inputs become float32. No forward-mode differentiation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gistkit.layouts.links import Links
from gistkit.ops._autograd import differentiable, once
from gistkit.ops._modes import autocast

_MIX = torch.ops.gistkit.trie_mix.default
_MIX_BACKWARD = once(torch.ops.gistkit.trie_mix_backward.default, "trie_mix")
_ATTEND = torch.ops.gistkit.ancestor_attention.default
_ATTEND_BACKWARD = once(torch.ops.gistkit.ancestor_attention_backward.default, "ancestor_attention")
_GELU = torch.ops.gistkit.bias_gelu.default
_GELU_BACKWARD = once(torch.ops.gistkit.bias_gelu_backward.default, "bias_gelu")


def trie_mix(weights: Tensor, table: Tensor, base: Tensor, paths: Links) -> Tensor:
    """out[n] = base[own symbol of n] + sum over i and h of weights[n, i, h] table[paths[n, i], h].

    Attention over few distinct keys, with its output projection and later linear maps, read from a table.
    Differentiable once in weights, table and base.

    Args:
        weights: [N, M, H], float32 or float64; values beyond a path's end are not read.
        table: [R, H, C], of weights' dtype and device, as base.
        base: [R, C].
        paths: N paths of 1 to M symbols below R, then -1; a node's own symbol is the last of its path. A gradient needs
            the entries of all rows. Values are checked on the CPU; on a GPU they are not, and invalid symbols are
            skipped.

    Returns:
        [N, C].

    Raises:
        ValueError: shapes that do not match.
        TypeError: an unsupported or mismatched dtype, or paths that are no Links.
        RuntimeError: on the CPU, paths with a symbol outside the table, no symbol, or a symbol after -1; in the
            backward pass, entries that do not match the rows.
    """
    weights, table, base = autocast(weights, table, base, dtype=torch.float32)
    _check_links("trie_mix", "paths", paths)
    _same_float("trie_mix", weights=weights, table=table, base=base)
    if table.dim() != 3 or base.shape != (table.shape[0], table.shape[2]):
        raise ValueError(
            f"trie_mix: expected table [R, H, C] and base [R, C], got {list(table.shape)} and {list(base.shape)}"
        )
    if weights.shape != (*paths.rows.shape, table.shape[1]):
        expected = [*paths.rows.shape, table.shape[1]]
        raise ValueError(f"trie_mix: expected weights {expected} as the paths and the table, got {list(weights.shape)}")
    _same_values("trie_mix", paths, "table", table.shape[0])
    return _mix(weights.contiguous(), table.contiguous(), base.contiguous(), *paths)


def ancestor_attention(
    query: Tensor, key: Tensor, value: Tensor, ancestors: Links, *, scale: float | None = None
) -> Tensor:
    """Attention of each query to its few listed keys.

    Differentiable once in query, key and value.

    Args:
        query: [N, H, D], float32 or float64; rows may have any stride, as those of key and value.
        key: [K, H, D], of query's dtype and device, as value.
        value: [K, H, D].
        ancestors: N rows of keys, each below K, or -1 for none; a query without keys gets 0. Entries and values as
            those of `trie_mix`.
        scale: of the dot products, 1/sqrt(D) by default.

    Returns:
        [N, H, D].

    Raises:
        ValueError: shapes that do not match, no head or no dim.
        TypeError, RuntimeError: as `trie_mix`.
    """
    query, key, value = autocast(query, key, value, dtype=torch.float32)
    _check_links("ancestor_attention", "ancestors", ancestors)
    _same_float("ancestor_attention", query=query, key=key, value=value)
    if query.dim() != 3 or 0 in query.shape[1:] or key.shape[1:] != query.shape[1:] or value.shape != key.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"ancestor_attention: expected query [N, H, D], key and value [K, H, D], got {shapes}")
    if len(ancestors.rows) != len(query):
        raise ValueError(
            f"ancestor_attention: expected ancestors of {len(query)} queries, got {len(ancestors.rows)} rows"
        )
    _same_values("ancestor_attention", ancestors, "key", len(key))
    rows = (x if _rows_apart(x) else x.contiguous() for x in (query, key, value))
    return _attend(*rows, *ancestors, query.shape[-1] ** -0.5 if scale is None else scale)[0]


def bias_gelu(x: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
    """gelu(scale x + bias) by the tanh form, in one pass.

    Differentiable once in x, bias and scale.

    Args:
        x: [N, C], float32 or float64.
        bias: [C], of x's dtype and device, as scale.
        scale: [N], a factor for each row.

    Returns:
        [N, C].

    Raises:
        ValueError: shapes that do not match.
        TypeError: an unsupported or mismatched dtype.
    """
    x, bias, scale = autocast(x, bias, scale, dtype=torch.float32)
    _same_float("bias_gelu", x=x, bias=bias, **({} if scale is None else {"scale": scale}))
    if x.dim() != 2 or bias.shape != x.shape[1:] or (scale is not None and scale.shape != x.shape[:1]):
        shapes = ", ".join(str(list(t.shape)) for t in (x, bias, scale) if t is not None)
        raise ValueError(f"bias_gelu: expected x [N, C], bias [C] and scale [N], got {shapes}")
    return _gelu(x.contiguous(), bias.contiguous(), None if scale is None else scale.contiguous())


def _check_links(op: str, name: str, links: Links) -> None:
    if not isinstance(links, Links) or not all(isinstance(x, Tensor) for x in links):
        raise TypeError(f"{op}: expected {name} to be Links of tensors, got {type(links).__name__}")


def _same_float(op: str, **tensors: Tensor) -> None:
    (first, like), *rest = tensors.items()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: expected {name} to be a torch tensor, got {type(tensor).__name__}")
    if like.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: expected {first} of dtype float32 or float64, got {like.dtype}")
    for name, tensor in rest:
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise TypeError(
                f"{op}: expected {name} of {first}'s dtype and device ({like.dtype}, {like.device}), "
                f"got {tensor.dtype}, {tensor.device}"
            )


def _same_values(op: str, links: Links, name: str, rows: int) -> None:
    if len(links.offsets) != rows + 1:
        raise ValueError(f"{op}: expected {name} with {len(links.offsets) - 1} rows, as the links, got {rows}")


def _rows_apart(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


@torch.library.register_fake("gistkit::trie_mix")
def _mix_fake(weights: Tensor, table: Tensor, base: Tensor, paths: Tensor, *_: Tensor) -> Tensor:
    return weights.new_empty((paths.shape[0], table.shape[2]))


@torch.library.register_fake("gistkit::trie_mix_backward")
def _mix_backward_fake(grad_out: Tensor, weights: Tensor, table: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(weights), _empty(table), table.new_empty((table.shape[0], table.shape[2]))


@torch.library.register_fake("gistkit::ancestor_attention")
def _attend_fake(query: Tensor, key: Tensor, value: Tensor, ancestors: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty(query), query.new_empty((*ancestors.shape, query.shape[1]))


@torch.library.register_fake("gistkit::ancestor_attention_backward")
def _attend_backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value)


@torch.library.register_fake("gistkit::bias_gelu")
def _gelu_fake(x: Tensor, bias: Tensor, scale: Tensor | None) -> Tensor:
    return _empty(x)


@torch.library.register_fake("gistkit::bias_gelu_backward")
def _gelu_backward_fake(
    grad_out: Tensor, x: Tensor, bias: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x), _empty(bias), x.new_empty((0,)) if scale is None else _empty(scale)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _mix_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, table, _, *paths = inputs
    ctx.save_for_backward(weights, table, *paths)


def _mix_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return *_MIX_BACKWARD(grad_out.contiguous(), *ctx.saved_tensors), None, None, None


def _attend_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _attend_backward(ctx: Any, grad_out: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
    return *_ATTEND_BACKWARD(grad_out.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None, None


def _gelu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, scale = inputs
    ctx.scaled = scale is not None
    ctx.save_for_backward(x, bias, *([scale] if ctx.scaled else []))


def _gelu_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, *scale = ctx.saved_tensors
    grad_x, grad_bias, grad_scale = _GELU_BACKWARD(grad_out.contiguous(), x, bias, scale[0] if ctx.scaled else None)
    return grad_x, grad_bias, grad_scale if ctx.scaled else None


_mix = differentiable(_MIX, _mix_backward, _mix_setup)
_attend = differentiable(_ATTEND, _attend_backward, _attend_setup)
_gelu = differentiable(_GELU, _gelu_backward, _gelu_setup)
