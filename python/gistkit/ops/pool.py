"""Means of keys and values over windows of tokens, with the keys rotated in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gistkit.ops._autograd import differentiable
from gistkit.ops._modes import autocast
from gistkit.ops._private import autocasts, levels
from gistkit.ops._windows import check_pool
from gistkit.ops.rope import whole_rows

_POOL = torch.ops.gistkit.window_pool.default
_SPREAD = torch.ops.gistkit.window_spread.default


def window_pool(
    key: Tensor,
    value: Tensor | None = None,
    *,
    windows: int | Tensor,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> Any:
    """Means over windows of tokens (AvgPool of GistPool's paper); with positions, the pooled keys are rotated too.

    Differentiable to any order in key and value; not in forward mode. Under `torch.autocast` both are cast like those
    of scaled_dot_product_attention.

    Args:
        key: keys [B, H, N, D], or hidden states [B, N, D]; float32, float64, bfloat16 or float16, summed in float32
            (float64) and rounded once.
        value: like key, with its dtype, device, number of dims, B and N; H and D may differ. Never rotated.
        windows: a number of tokens, at least 1: windows start at the first token, and the last may be shorter. Or int64
            offsets, [W + 1] or [B, W + 1]: window w is the tokens [offsets[w], offsets[w + 1]), and tokens outside of
            all are left out. Offsets ascend within 0..N and every window has a token. A row of [B, W + 1] with fewer
            windows than others repeats its last offset; its missing windows are 0. Values are checked on the CPU,
            except while compiling. On a GPU they are not checked, to avoid a synchronisation: tokens outside 0..N are
            ignored, and a window without tokens is 0.
        positions: of the windows, [W], [1, W] or [B, W]: finite integers or floats (checked as `rope` checks them),
            such as the windows' mean positions, by which keys [B, H, N, D] are rotated after pooling as `rope` does;
            not differentiable.
        inv_freq: [R/2] angle per unit of position, R <= D, given with positions; not differentiable.
        scaling, interleaved: of the rotation, as `rope` has them.

    Returns:
        The pooled key [B, H, W, D] or [B, W, D]; with value both, as a pair.

    Raises:
        ValueError: shapes that do not match, no token, positions without inv_freq, or a gradient of either; on the
            CPU a window without tokens, and offsets that descend or leave the text.
        TypeError: an unsupported or mismatched dtype.
    """
    if autocasts():
        key, value = autocast(key, value)
    offsets, positions, inv_freq = check_pool(key, value, windows, positions, inv_freq)
    hidden = key.dim() == 3
    keys = key[:, None] if hidden else key
    if value is None:
        values = keys.new_empty((keys.shape[0], 0, *keys.shape[2:]))
    else:
        values = value[:, None] if hidden else value
    run = _pool if torch.is_grad_enabled() or levels._current_level >= 0 else _POOL
    pooled = run(whole_rows(keys), whole_rows(values), offsets, positions, inv_freq, scaling, interleaved)
    if value is None:
        return pooled[0][:, 0] if hidden else pooled[0]
    return (pooled[0][:, 0], pooled[1][:, 0]) if hidden else pooled


@torch.library.register_fake("gistkit::window_pool")
def _pool_fake(key: Tensor, value: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    windows = offsets.shape[1] - 1
    pooled = [x.new_empty((*x.shape[:2], windows, x.shape[3])) for x in (key, value)]
    return pooled[0], pooled[1]


@torch.library.register_fake("gistkit::window_spread")
def _spread_fake(
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    positions: Tensor | None,
    inv_freq: Tensor | None,
    scaling: float,
    interleaved: bool,
    tokens: int,
    tokens_first: bool,
) -> tuple[Tensor, Tensor]:
    def empty(x: Tensor) -> Tensor:
        batch, heads, _, dim = x.shape
        if tokens_first:
            return x.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
        return x.new_empty((batch, heads, tokens, dim))

    return empty(key), empty(value)


def _only(wanted: bool, rows: Tensor) -> Tensor:
    """Rows to work on, or none of them where no gradient is wanted."""
    return whole_rows(rows) if wanted else rows.new_empty((rows.shape[0], 0, *rows.shape[2:]))


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:5])
    ctx.rotation = inputs[5:7]


def _pool_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _spread_setup(ctx, inputs, output)
    key = inputs[0]
    ctx.tokens, ctx.tokens_first = key.shape[2], key.stride(1) < key.stride(2)


def _pool_backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
    need_key, need_value = ctx.needs_input_grad[:2]
    key, value = _spread(
        _only(need_key, grad_key),
        _only(need_value, grad_value),
        *ctx.saved_tensors,
        *ctx.rotation,
        ctx.tokens,
        ctx.tokens_first,
    )
    return (key if need_key else None, value if need_value else None, *[None] * 5)


def _spread_backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
    # The transpose of the transpose.
    need_key, need_value = ctx.needs_input_grad[:2]
    grads = _only(need_key, grad_key), _only(need_value, grad_value)
    key, value = _pool(*grads, *ctx.saved_tensors, *ctx.rotation)
    return (key if need_key else None, value if need_value else None, *[None] * 7)


_pool = differentiable(_POOL, _pool_backward, _pool_setup)
_spread = differentiable(_SPREAD, _spread_backward, _spread_setup)
