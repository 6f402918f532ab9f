"""The attention and mask functions that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gistkit import ops
from gistkit.layouts import Plan

ATTENTION_NAME = "gistkit"

Recorder = Callable[[int, Tensor, Tensor], None]


def causal_plan(num_queries: int, num_keys: int, device: torch.device) -> Plan:
    """The plan of plain causal attention: the queries are the last `num_queries` of `num_keys` tokens."""
    end = torch.arange(num_keys - num_queries + 1, num_keys + 1, dtype=torch.int32, device=device)
    return Plan(torch.stack([torch.zeros_like(end), end], -1)[None, :, None], num_keys)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    plan: Plan | None = None,
    recorder: Recorder | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention under `plan`, in transformers' calling convention; without a plan, plain causal attention.

    Args:
        query, key, value: [B, Hq, Nq, D] and [B, Hk, Nk, D], rotated already.
        attention_mask: None or what `mask` returned; visibility is the plan's alone.
        plan: the `plan` keyword argument of `model(...)`.
        recorder: the `recorder` keyword argument of `model(...)`: called with (layer index, query, key).

    Returns:
        The output as [B, Nq, Hq, D], and None in place of attention weights.

    Raises:
        ValueError: if attention dropout is asked for, or a dense mask was passed to the model.
    """
    if dropout:
        raise ValueError(f"attention_dropout: expected 0 with gistkit's attention, got {dropout}")
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: expected none beside a plan, got a mask of shape {tuple(attention_mask.shape)}; "
            "say who sees whom in the layout"
        )
    if plan is None:
        plan = causal_plan(query.shape[2], key.shape[2], query.device)
    if recorder is not None:
        recorder(getattr(module, "layer_idx", -1), query, key)
    out = cast(Tensor, ops.attention(query, key, value, plan, scale=scaling, softcap=softcap))
    return out.transpose(1, 2), None


def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """No mask at all: the plan says who sees whom.

    Being registered keeps transformers from reading position ids that do not grow by 1 as packed sequences.

    Raises:
        ValueError: if a 2-D attention mask marks padding; a ragged batch is compiled into the plan instead.
    """
    if attention_mask is not None and not torch.compiler.is_compiling() and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask: expected none or all ones with gistkit's attention, got a mask with padding; compile a "
            "ragged batch of layouts into the plan instead (gistkit.layouts.compile_batch)"
        )
