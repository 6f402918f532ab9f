"""The attention and mask functions that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gistkit import ops
from gistkit.hf.keep import Keeper, Layers
from gistkit.layouts import Plan, causal_plan

# What `model(...)` takes under `attach`. Transformers hands on any other name without a word.
ARGUMENTS = ("plan", "memory", "keep", "key_bias", "extend")
# What other families' attention may be given and gistkit's does not have: sinks and biases of pairs of tokens.
_REFUSED = ("s_aux", "position_bias", "attention_bias", "head_mask")

Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    plan: Plan | None = None,
    memory: Layers | None = None,
    keep: Keeper | None = None,
    key_bias: Tensor | None = None,
    extend: Extend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention under `plan`, in transformers' calling convention; without a plan, plain causal attention.

    Args:
        query, key, value: [B, Hq, Nq, D] and [B, Hk, N, D], rotated already.
        attention_mask: None or what `mask` returned; visibility is the plan's alone.
        sliding_window: the layer's width; the plan is then `plan.windowed[sliding_window]`.
        plan, memory, keep, key_bias, extend: the keyword arguments of `model(...)`, see `attach`.

    Returns:
        The output as [B, Nq, Hq, D], and None in place of attention weights.

    Raises:
        ValueError: if something is asked for that the plan or the op does not have, such as dropout, a dense mask or
            a window the plan was not compiled for.
    """
    if dropout:
        raise ValueError(
            f"attention_dropout: expected 0 with gistkit's attention (attn_pdrop of a GPT-2 too), got {dropout}"
        )
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: expected none beside a plan, got a mask of shape {tuple(attention_mask.shape)}; "
            "say who sees whom in the layout"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"model: expected attention without {name}, which gistkit's lacks, got one that has it")
    layer = cast(int, getattr(module, "layer_idx", -1))
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # Norms after the projections may have left another dtype than the values have.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if keep is not None:
        keep.store(layer, key, value)
    if memory is not None:
        key, value = _behind(memory, layer, key, value)
    if extend is not None:
        key, value = extend(layer, key, value)
    own = _layer_plan(plan, sliding_window, query, key)
    out = cast(Tensor, ops.attention(query, key, value, own, scale=scaling, softcap=softcap, key_bias=key_bias))
    return out.transpose(1, 2), None


def _behind(memory: Layers, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hk, K + N, D]: the memory's of this layer, then the layer's own."""
    both = []
    for name, held, own in zip(("keys", "values"), memory[layer], (key, value), strict=True):
        batch, heads, _, dim = own.shape
        if held.dim() != 4 or held.shape[0] not in (1, batch) or (held.shape[1], held.shape[3]) != (heads, dim):
            raise ValueError(
                f"memory: expected {name} [{'1' if batch == 1 else f'1 or {batch}'}, {heads}, K, {dim}] for layer "
                f"{layer}, got shape {tuple(held.shape)}"
            )
        both.append(torch.cat([held.to(own).expand(batch, -1, -1, -1), own], 2))
    return both[0], both[1]


def _layer_plan(plan: Plan | None, window: int | None, query: Tensor, key: Tensor) -> Plan:
    """The plan of one layer, whose sliding window may be `window`."""
    if plan is None:
        return causal_plan(query.shape[2], key.shape[2], query.device, window)
    if window is None:
        return plan
    if plan.num_keys > key.shape[2]:
        raise ValueError(
            f"past_key_values: expected a cache that keeps the {plan.num_keys} keys of the plan in sliding-window "
            f"layers too, such as DynamicCache() made without a config, got {key.shape[2]} keys"
        )
    cut = plan.windowed.get(window)
    if cut is not None:
        return cut
    if (plan.num_keys if plan.reach is None else plan.reach) > window:
        raise ValueError(
            f"plan: expected one compiled for a sliding window of {window} with windows=({window},), see "
            f"gistkit.hf.sliding_windows, got one for {tuple(plan.windowed) or 'none'}"
        )
    return plan


def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """No mask at all: the plan says who sees whom.

    Being registered keeps transformers from reading position ids that do not grow by 1 as packed sequences.

    Raises:
        ValueError: if a 2-D attention mask marks padding; a ragged batch is compiled into the plan instead.
    """
    if attention_mask is None or torch.compiler.is_compiling():
        return None
    # A graph may be captured; else the host waits, once a pass: to go on would be to read padding.
    captured = attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask: expected none or all ones with gistkit's attention, got a mask with padding; compile a "
            "ragged batch of layouts into the plan instead (gistkit.layouts.compile_batch)"
        )
