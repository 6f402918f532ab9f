"""attach: gistkit's attention and RoPE inside a transformers model, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, LlamaRotaryEmbedding

from gistkit import ops
from gistkit.hf import attention as hooks


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Runs `model` on gistkit's attention and RoPE inside the `with` block, and leaves it as it was.

    Inside, `model(...)` takes a keyword argument `plan` (a compiled layout): its spans say who sees whom, and its
    positions are the position ids unless `position_ids` is given. Without a plan attention is plain causal.
    `recorder`, a function of (layer index, query, key), is called in every layer with the rotated tensors.
    Attaching twice is allowed; the inner block does nothing. With gradient checkpointing the backward pass runs layers
    again: it belongs inside the block too.

    Args:
        model: a transformers Llama, with or without its language model head.

    Raises:
        TypeError: if the model has no Llama decoder in it.
    """
    decoder = next((module for module in model.modules() if isinstance(module, LlamaModel)), None)
    if decoder is None:
        raise TypeError(f"model: expected a transformers Llama model, got {type(model).__name__}")
    if decoder.config._attn_implementation == hooks.ATTENTION_NAME:
        yield model
        return
    AttentionInterface.register(hooks.ATTENTION_NAME, hooks.attention)
    AttentionMaskInterface.register(hooks.ATTENTION_NAME, hooks.mask)
    with ExitStack() as undo:
        before = model.config._attn_implementation
        model.set_attn_implementation(hooks.ATTENTION_NAME)
        undo.callback(model.set_attn_implementation, before)
        handle = decoder.register_forward_pre_hook(_positions_of_plan, with_kwargs=True)
        undo.callback(handle.remove)
        for module in decoder.modules():
            if isinstance(module, LlamaAttention):
                _replace_forward(undo, module, _attention_forward)
            elif isinstance(module, LlamaRotaryEmbedding):
                _replace_forward(undo, module, _rotary_forward)
        yield model


def _replace_forward(undo: ExitStack, module: nn.Module, forward: Any) -> None:
    """Gives one instance a forward of its own; undoing it puts back the instance's or uncovers the class's."""
    if "forward" in vars(module):
        undo.callback(setattr, module, "forward", vars(module)["forward"])
    else:
        undo.callback(delattr, module, "forward")
    module.forward = MethodType(forward, module)


def _positions_of_plan(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    plan = kwargs.get("plan")
    if plan is not None and plan.positions is not None and kwargs.get("position_ids") is None:
        positions = plan.positions
        if positions.dim() > 2:
            raise ValueError(
                f"plan: expected position ids [N] or [B, N] for a Llama, got {tuple(positions.shape)} with several axes"
            )
        kwargs = kwargs | {"position_ids": positions if positions.dim() == 2 else positions[None]}
    return args, kwargs


@torch.no_grad()
@dynamic_rope_update
def _rotary_forward(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, float]:
    """Hands position ids and frequencies on as they are: the fused op makes the angles itself."""
    return position_ids, self.inv_freq, self.attention_scaling


def _attention_forward(
    self: LlamaAttention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor, float],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    batch, length, _ = hidden_states.shape
    heads = (batch, length, -1, self.head_dim)
    query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
    key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
    value = self.v_proj(hidden_states).view(heads).transpose(1, 2)

    position_ids, inv_freq, scaling = position_embeddings
    query, key = ops.rope(query, key, position_ids, inv_freq, scaling=scaling)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
        if kwargs.get("plan") is None and past_key_values.is_compileable:
            raise ValueError(
                "past_key_values: expected a cache that grows, such as DynamicCache, or a plan, got a static cache "
                "without a plan: which of its keys are filled is not known"
            )

    dropout = float(self.attention_dropout or 0.0) if self.training else 0.0
    out, _ = hooks.attention(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs)
    return self.o_proj(out.reshape(batch, length, -1)), None
