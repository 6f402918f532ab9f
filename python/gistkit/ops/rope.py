"""Rotary position embedding: queries and keys in one pass, at any positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gistkit import _gpu
from gistkit.ops._autograd import differentiable, once
from gistkit.ops._modes import autocast
from gistkit.ops._private import autocasts, below_autograd, levels, transforms

_ROPE = torch.ops.gistkit.rope.default
_ANGLE_GRAD = once(torch.ops.gistkit.rope_angle_grad.default, "rope", "a second derivative by inv_freq or positions")

# Of queries, keys and values in all ops.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_KERNEL_POSITIONS = (torch.int32, torch.int64, torch.float32, torch.float64)


def rope(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates each pair of dims of queries and keys by its token's angle (RoFormer, arXiv 2104.09864, eq. 34).

    The angle of frequency f at token n is the sum over axes a of positions[a, b, n] * inv_freq[a, f], computed exactly
    and reduced before rounding, so that large positions lose no precision. Differentiable in query, key, inv_freq and
    floating positions, not in forward mode. Under `torch.autocast` queries and keys are cast like those of
    scaled_dot_product_attention.

    Args:
        query: [B, Hq, N, D]; float32, float64, bfloat16 or float16, rotated in float32 (float64) and rounded once.
        key: [B, Hk, N, D], of query's dtype and device; Hk may be 0.
        positions: [N], [B, N] or [A, B, N] (B may be 1) for A axes; integers up to 2^53 or floats, in any order and
            with repeats. NaN and infinity are refused on the CPU, except while compiling. On a GPU values are not
            checked; such a position gives NaN.
        inv_freq: angle per unit of position, [R/2], [A, R/2] or, for frequencies of each head, [H, A, R/2] with
            H = Hq = Hk (RoPE2D-Mix, arXiv 2403.13298, eq. 14). Dims from R on are copied.
        scaling: factor of cosines and sines (transformers' attention_scaling).
        interleaved: pairs are dims (2f, 2f + 1); otherwise (f, f + R/2).

    Returns:
        The rotated query and key.

    Raises:
        ValueError: shapes that do not match, or positions on the CPU that are not finite.
        TypeError: an unsupported or mismatched dtype.
    """
    if autocasts():
        query, key = autocast(query, key)
    # Whole positions, as models have them, go to the op at once, which refuses what it cannot read; which argument that
    # is, and whether a copy or a cast helps, is found out only then.
    if isinstance(positions, Tensor) and positions.dtype == torch.int64 and not torch.compiler.is_compiling():
        try:
            return _turned(query, key, positions, inv_freq, scaling, interleaved)
        except (RuntimeError, TypeError, AttributeError):
            pass
    _check_shapes(query, key, positions, inv_freq)
    positions, inv_freq = kernel_angles(positions, inv_freq)
    return _turned(whole_rows(query), whole_rows(key), positions, inv_freq, scaling, interleaved)


def _turned(
    query: Tensor, key: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    # In place of `unrecorded`, whose Python a call of some microseconds feels.
    if torch.is_grad_enabled() or levels._current_level >= 0 or transforms() or torch.compiler.is_compiling():
        return _rotate(query, key, positions, inv_freq, scaling, interleaved, False)  # type: ignore[no-any-return]
    with below_autograd():
        return _ROPE(query, key, positions, inv_freq, scaling, interleaved, False)  # type: ignore[no-any-return]


def rerotate(key: Tensor, delta: Tensor | float, inv_freq: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotated keys moved by `delta` positions, as if they had been rotated at position + delta from the start.

    Args:
        key: [B, Hk, N, D] that `rope` rotated, such as cached keys; their `scaling` is kept.
        delta: a number for all tokens, or a tensor in one of the forms of `rope`'s positions.
        inv_freq: as given to `rope`.
        interleaved: as given to `rope`.

    Returns:
        The keys at their new positions.
    """
    if key.dim() != 4:
        raise ValueError(f"key: expected [B, Hk, N, D], got shape {tuple(key.shape)}")
    if not isinstance(delta, Tensor):
        if not math.isfinite(delta):
            raise ValueError(f"delta: expected a finite number, got {delta}")
        delta = torch.full(key.shape[-2:-1], delta, device=key.device, dtype=torch.float64)
    none = key.new_empty((*key.shape[:1], 0, *key.shape[2:]))
    return rope(key, none, delta, inv_freq, interleaved=interleaved)[0]


def whole_rows(heads: Tensor) -> Tensor:
    """The tensor, or a copy, whose last dimension is contiguous."""
    return heads if heads.shape[-1] <= 1 or heads.stride(-1) == 1 else heads.contiguous()


def kernel_angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Positions, which must be finite, and frequencies in types that kernels read."""
    if positions.is_floating_point() and _gpu.has_values(positions) and not positions.isfinite().all():
        bad = positions[~positions.isfinite()][0].item()
        raise ValueError(f"positions: expected finite values, got {bad}")
    if positions.dtype not in _KERNEL_POSITIONS:
        positions = positions.to(torch.float32 if positions.is_floating_point() else torch.int64)
    if inv_freq.dtype not in (torch.float32, torch.float64):
        inv_freq = inv_freq.float()
    return positions, inv_freq.contiguous()


def _check_shapes(query: Tensor, key: Tensor, positions: Tensor, inv_freq: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("positions", positions), ("inv_freq", inv_freq)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    for name, heads, count in (("query", query, "Hq"), ("key", key, "Hk")):
        if heads.dim() != 4:
            raise ValueError(f"{name}: expected [B, {count}, N, D], got shape {tuple(heads.shape)}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query: expected float32, float64, bfloat16 or float16, got {query.dtype}")
    if key.dtype != query.dtype:
        raise TypeError(f"key: expected query's dtype {query.dtype}, got {key.dtype}")
    batch, _, tokens, dim = query.shape
    if key.shape[0] != batch or key.shape[2] != tokens or key.shape[3] != dim:
        raise ValueError(f"key: expected [{batch}, Hk, {tokens}, {dim}] as query's, got shape {tuple(key.shape)}")
    for name, tensor in (("key", key), ("positions", positions), ("inv_freq", inv_freq)):
        if tensor.device != query.device:
            raise ValueError(f"{name}: expected query's device {query.device}, got {tensor.device}")

    if not inv_freq.is_floating_point():
        raise TypeError(f"inv_freq: expected a floating dtype, got {inv_freq.dtype}")
    if not 1 <= inv_freq.dim() <= 3:
        raise ValueError(f"inv_freq: expected [R/2], [A, R/2] or [H, A, R/2], got shape {tuple(inv_freq.shape)}")
    axes = inv_freq.shape[-2] if inv_freq.dim() > 1 else 1
    if axes == 0:
        raise ValueError(f"inv_freq: expected at least one axis, got shape {tuple(inv_freq.shape)}")
    if 2 * inv_freq.shape[-1] > dim:
        raise ValueError(
            f"inv_freq: expected at most D/2 = {dim // 2} frequencies for head dim {dim}, got {inv_freq.shape[-1]}"
        )
    per_head = inv_freq.dim() == 3 and inv_freq.shape[0] != 1
    if per_head and not (query.shape[1] in (0, inv_freq.shape[0]) and key.shape[1] in (0, inv_freq.shape[0])):
        raise ValueError(
            f"inv_freq: expected [H, A, R/2] with H = 1 or H = Hq = Hk, got H = {inv_freq.shape[0]} for "
            f"Hq = {query.shape[1]}, Hk = {key.shape[1]}"
        )

    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions: expected an integer or floating dtype, got {positions.dtype}")
    if not 1 <= positions.dim() <= 3:
        raise ValueError(f"positions: expected [N], [B, N] or [A, B, N], got shape {tuple(positions.shape)}")
    position_axes = positions.shape[0] if positions.dim() == 3 else 1
    if position_axes != axes:
        raise ValueError(
            f"positions: expected {axes} axes to match inv_freq {tuple(inv_freq.shape)}, got {position_axes} in shape "
            f"{tuple(positions.shape)}"
        )
    if positions.shape[-1] != tokens or (positions.dim() > 1 and positions.shape[-2] not in (1, batch)):
        raise ValueError(
            f"positions: expected [N], [B, N] or [A, B, N] with B = {batch}, N = {tokens}, got shape "
            f"{tuple(positions.shape)}"
        )


@torch.library.register_fake("gistkit::rope")
def _rope_fake(
    query: Tensor, key: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling():
        # Where nothing has values, shapes are all that can be refused.
        _check_shapes(query, key, positions, inv_freq)
    return torch.empty_like(query), torch.empty_like(key)


@torch.library.register_fake("gistkit::rope_angle_grad")
def _angle_grad_fake(
    grad_query: Tensor, grad_key: Tensor, query: Tensor, key: Tensor, positions: Tensor, inv_freq: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    by_positions = positions.new_empty(positions.shape, dtype=torch.float64)
    return by_positions, inv_freq.new_empty(inv_freq.shape, dtype=torch.float64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, positions, inv_freq, ctx.scaling, ctx.interleaved, ctx.inverse = inputs
    # The heads serve only the gradients of the angles.
    angles = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    ctx.save_for_backward(positions, inv_freq, *((query, key) if angles else ()))


def _backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
    positions, inv_freq, *heads = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * 7
    rows = whole_rows(grad_query), whole_rows(grad_key)
    options = ctx.scaling, ctx.interleaved
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        grads[:2] = _rotate(*rows, positions, inv_freq, *options, not ctx.inverse)
    if heads:
        by_positions, by_inv_freq = _ANGLE_GRAD(*rows, *heads, positions, inv_freq, *options, ctx.inverse)
        if ctx.needs_input_grad[2]:
            grads[2] = by_positions.to(positions.dtype)
        if ctx.needs_input_grad[3]:
            grads[3] = by_inv_freq.to(inv_freq.dtype)
    return tuple(grads)


_rotate = differentiable(_ROPE, _backward, _setup_context)
