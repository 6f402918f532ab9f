"""attach: gistkit's attention and RoPE inside a transformers model, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_rope_utils import dynamic_rope_update

from gistkit import ops
from gistkit.hf import attention as hooks
from gistkit.hf.families import ATTENTION_NAME, Family, checkpointed, decoder_of, parts_of, rope_modules
from gistkit.hf.forwards import forwards
from gistkit.hf.keep import Keeper
from gistkit.layouts import Plan

Model = TypeVar("Model", bound=nn.Module)
# The classes of decoders that transformers has let name an attention of another's.
_ACCEPTED: set[type[PreTrainedModel]] = set()


@contextmanager
def attach(model: Model) -> Iterator[Model]:
    """Runs `model` on gistkit's attention and RoPE inside the `with` block, and leaves it as it was.

    Inside, `model(...)` takes these keyword arguments. In gradient checkpointing the backward pass runs layers again:
    it belongs inside the block too. Attaching twice is allowed; the inner block does nothing.

    - plan: a compiled layout. Its spans say who sees whom, and its positions are the position ids unless
      `position_ids` is given. Layers with a sliding window take its plan for their width, so compile it with
      `windows=sliding_windows(model)`; only a plan whose tokens all lie within the window does without. Without a plan
      attention is plain causal, within each layer's window.
    - memory: (key, value) a layer, [B or 1, Hk, K, D], which come before the layer's own keys and those of
      `past_key_values`; num_keys of the plan counts them.
    - keep: a `Keeper`, such as `KeptKeys`: its `store` is given each layer's own rotated keys and values (those of
      `past_key_values` are among them), and its `leave` the hidden states before and after each layer.
    - key_bias: [B or 1, Hq or 1, keys], float32 (float64 for a float64 model), added to the logits of each key in every
      layer, as by `ops.attention`; it counts all keys, memory and cache too.
    - extend: a function of (layer index, key, value), called in every layer with all its rotated keys and values
      [B, Hk, N, D], which returns those that attention runs over; num_keys of the plan counts them. Gradient
      checkpointing calls it again.

    Args:
        model: a transformers decoder, with or without its language model head, or a module with one in it, such as a
            PEFT model. Llama, Mistral, Qwen2, Qwen3, Gemma2 and Gemma3 run on gistkit's attention and RoPE, GPT-2 and
            others that follow transformers' attention interface on its attention and their own positions.

    Raises:
        TypeError: if the model is an encoder-decoder, not causal, or does not follow the attention interface; from
            `model(...)`, if an argument of another name is a plan, a keeper or a function, which no model would read.
    """
    decoder = decoder_of(model)
    if decoder.config._attn_implementation == ATTENTION_NAME:
        yield model
        return
    AttentionInterface.register(ATTENTION_NAME, hooks.attention)
    AttentionMaskInterface.register(ATTENTION_NAME, hooks.mask)
    with ExitStack() as undo:
        undo.enter_context(_implementation(decoder))
        handle = decoder.register_forward_pre_hook(_check_and_place, with_kwargs=True)
        undo.callback(handle.remove)
        attentions, rotaries = rope_modules(decoder)
        own = {it: MethodType(_attention_forward(family), it) for it, family in attentions.items()}
        undo.enter_context(forwards(own | {it: MethodType(_rotary_forward, it) for it in rotaries}))
        for attention, layer in zip(attentions, parts_of(decoder).layers, strict=False):
            # Before the hooks that others have: one that shards weights again must not come first.
            hook = layer.register_forward_hook(_leave(cast(int, attention.layer_idx)), prepend=True, with_kwargs=True)
            undo.callback(hook.remove)
        yield model


@contextmanager
def _implementation(decoder: PreTrainedModel) -> Iterator[None]:
    """The decoder's configuration names gistkit's attention; afterwards the one that it had."""
    before = decoder.config._attn_implementation
    _name_attention(decoder, ATTENTION_NAME)
    if decoder.config._attn_implementation != ATTENTION_NAME:
        raise TypeError(
            "model: expected a transformers decoder that follows the attention interface, got "
            f"{type(decoder).__name__} with attention of its own"
        )
    _ACCEPTED.add(type(decoder))
    try:
        yield
    finally:
        _name_attention(decoder, before)


def _name_attention(decoder: PreTrainedModel, name: str) -> None:
    if type(decoder) in _ACCEPTED and parts_of(decoder).one_config:
        # All that transformers' switch does then, but for a walk through the model.
        decoder.config._attn_implementation = name
    else:
        decoder.set_attn_implementation(name)


def _check_and_place(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Refuses what no layer could tell, and gives the decoder the plan's position ids."""
    for name, value in kwargs.items():
        if name not in hooks.ARGUMENTS and (isinstance(value, Plan | Keeper) or callable(value)):
            raise TypeError(
                f"{name}: expected one of the arguments {', '.join(hooks.ARGUMENTS)} under gistkit.hf.attach, got "
                f"another name for an object of type {type(value).__name__}"
            )
    plan, memory, cache = kwargs.get("plan"), kwargs.get("memory"), kwargs.get("past_key_values")
    layers = decoder.config.num_hidden_layers
    if memory is not None and len(memory) != layers:
        raise ValueError(f"memory: expected (key, value) for each of {layers} layers, got {len(memory)}")
    bias = kwargs.get("key_bias")
    learned = bias if bias is not None and bias.requires_grad else None
    for name, its in (("memory", memory), ("keep", kwargs.get("keep")), ("key_bias", learned)):
        if its is not None and checkpoints_reentrantly(decoder):
            raise ValueError(
                f"{name}: expected gradient checkpointing with use_reentrant=False, got use_reentrant=True, which "
                "loses the gradients of what layers share beside their hidden states"
            )
    if plan is None:
        if getattr(cache, "is_compileable", False):
            raise ValueError(
                "past_key_values: expected a cache that grows, such as DynamicCache, or a plan, got a static cache "
                "without a plan: which of its keys are filled is not known"
            )
        return args, kwargs
    positions = plan.positions
    if positions is None or kwargs.get("position_ids") is not None:
        return args, kwargs
    if positions.dim() > 2:
        raise ValueError(
            f"plan: expected position ids [N] or [B, N] for a {decoder.config.model_type} model, got "
            f"{tuple(positions.shape)} with several axes"
        )
    if positions.is_floating_point() and not hasattr(decoder, "rotary_emb"):
        raise ValueError(
            f"plan: expected whole position ids for a {decoder.config.model_type} model, which has a table of them, "
            f"got {positions.dtype}"
        )
    return args, kwargs | {"position_ids": positions if positions.dim() == 2 else positions[None]}


def _leave(layer_idx: int) -> Callable[..., None]:
    """A hook on a decoder layer that tells `keep` of its hidden states."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        keep = kwargs.get("keep")
        if keep is not None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            keep.leave(layer_idx, layer, before, after, kwargs["position_embeddings"])

    return hook


def checkpoints_reentrantly(decoder: nn.Module) -> bool:
    """Whether this pass checkpoints layers in the form that knows the gradients of their hidden states alone."""
    if not decoder.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    layer = next(iter(checkpointed(decoder)), None)
    options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    return bool(options.get("use_reentrant", False))


@torch.no_grad()
@dynamic_rope_update
def _rotary_forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Any, ...]:
    """Hands position ids and frequencies on as they are: the fused op makes the angles itself."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    return position_ids, getattr(self, f"{prefix}inv_freq"), getattr(self, f"{prefix}attention_scaling")


@lru_cache
def _attention_forward(family: Family) -> Callable[..., tuple[Tensor, None]]:
    """The forward of a layer with RoPE, in the order of operations that the families share."""

    def forward(
        self: Any,
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
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)

        position_ids, inv_freq, factor = position_embeddings
        query, key = ops.rope(query, key, position_ids, inv_freq, scaling=factor)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        out, _ = hooks.attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=float(self.attention_dropout or 0.0) if self.training else 0.0,
            softcap=family.softcap_of(self),
            sliding_window=family.window_of(self),
            **kwargs,
        )
        return self.o_proj(out.reshape(batch, length, -1)), None

    return forward
