"""encode_positions: transformers' GPT-2 with another position encoding in place of its learned one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from gistkit.hf.attach import attach, attention, cache_of, checkpoints_reentrantly, decoder_of, forwards
from gistkit.hf.cache import CACHE
from gistkit.layouts import Plan
from gistkit.nn import PositionEncoding

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def encode_positions(model: Model, position: PositionEncoding) -> Iterator[Model]:
    """Runs a GPT-2 with `position` in place of its learned positions inside the `with` block, and leaves it as it was.

    Inside, the model is attached (see `attach`; it takes the same keyword arguments), and `model(...)` takes
    `embeddings` too: [N, out_dim] or [B, N, out_dim], SeqPE's outputs at these positions where they are there already,
    such as those of `SeqPERegularizer`. Otherwise SeqPE's encoder reads the position ids on the CPU. Ids that are given
    there, or not given, reach it as they are; those on a GPU, of a plan on one too, are copied, which waits for it.

    A cache holds keys with their positions, so `generate` and passes in chunks are exact; it belongs to
    the encoding that filled it. In `generate` the encoding is frozen: it computes each position once. Rows of a batch
    may be padded at either end, as `attention_mask` says. As in transformers' GPT-2, a row padded on the left has the
    positions of an unpadded row only if `position_ids` says so, as in `generate`. Training, the backward pass of
    gradient checkpointing too, belongs inside the block.

    Args:
        model: a transformers GPT-2, or a module with one in it, such as a PEFT model.
        position: of 1 axis and no extra tokens, for the model's heads, on its device. Its parameters are not the
            model's: give them to the optimizer, and save them, beside it.

    Raises:
        TypeError: if the model is not a GPT-2, or `position` not a position encoding.
        ValueError: if `position` is an encoding for images.
    """
    decoder = decoder_of(model)
    if decoder.config.model_type != "gpt2":
        raise TypeError(f"model: expected a transformers GPT-2, got {type(decoder).__name__}")
    if not isinstance(position, PositionEncoding):
        raise TypeError(f"position: expected a PositionEncoding, got {type(position).__name__}")
    if position.axes not in (None, 1) or position.extra_tokens:
        raise ValueError(
            f"position: expected one with axes=1 and extra_tokens=0, got {type(position).__name__} with "
            f"axes={position.axes} and extra_tokens={position.extra_tokens}"
        )
    with ExitStack() as undo:
        undo.enter_context(attach(model))
        # After attach's own hook, which gives a plan's position ids.
        undo.callback(decoder.register_forward_pre_hook(_prepare(position), with_kwargs=True).remove)
        parts = cast(Any, decoder)
        own_forwards: dict[nn.Module, Any] = {parts.wpe: MethodType(_embed(position), parts.wpe)}
        own_forwards |= {block.attn: MethodType(_attention(position), block.attn) for block in parts.h}
        undo.enter_context(forwards(own_forwards))
        for part in model.modules():
            if isinstance(part, GenerationMixin):
                undo.enter_context(_frozen_generate(part, position))
        yield model


@contextmanager
def _frozen_generate(model: Any, position: PositionEncoding) -> Iterator[None]:
    """Inside, the model's `generate` runs with the encoding frozen."""
    generate, before = model.generate, vars(model).get("generate")

    @wraps(generate)
    def frozen(*args: Any, **kwargs: Any) -> Any:
        with position.frozen():
            return generate(*args, **kwargs)

    vars(model)["generate"] = frozen
    try:
        yield
    finally:
        del vars(model)["generate"]
        if before is not None:
            vars(model)["generate"] = before


def _prepare(position: PositionEncoding) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A hook on the decoder that prepares what its layers share: positions, biases of keys, a plan of the padding."""

    def hook(decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if checkpoints_reentrantly(decoder):
            raise ValueError(
                "position: expected gradient checkpointing with use_reentrant=False, got use_reentrant=True, which "
                "loses the gradients of what layers share beside their hidden states"
            )
        ids = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            # Transformers raises the error.
            return args, kwargs
        batch, count = tokens.shape[:2]
        cache = cache_of(kwargs)
        keys = count if cache is None else cache.get_mask_sizes(count, 0)[0]
        new_kwargs = dict(kwargs)
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            place = torch.device("cpu") if position.on_host else tokens.device
            position_ids = torch.arange(start, start + count, device=place)[None]
        new_kwargs["position_ids"] = position_ids.to(tokens.device, non_blocking=True)
        if not position.on_host:
            position_ids = new_kwargs["position_ids"]
        if cache is not None:
            position.check_cached(position_ids)
        mask = kwargs.get("attention_mask")
        if kwargs.get("plan") is None and mask is not None and mask.dim() == 2 and not bool(mask.all()):
            new_kwargs["plan"], new_kwargs["attention_mask"] = _padded_plan(mask, batch, count, keys), None
        new_kwargs["encoded"] = position.prepare(position_ids, new_kwargs.pop("embeddings", None))
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        if position.key_bias(position_ids[:, :0], dtype) is not None:
            if kwargs.get("memory") is not None:
                raise ValueError(
                    f"memory: expected none with {type(position).__name__}, whose bias needs the positions of all "
                    "keys, got one"
                )
            bias = cast(Tensor, position.key_bias(_key_positions(position_ids, keys), dtype))
            key_bias = kwargs.get("key_bias")
            new_kwargs["key_bias"] = bias if key_bias is None else bias + key_bias
        return args, new_kwargs

    return hook


def _embed(position: PositionEncoding) -> Callable[..., Tensor]:
    """The forward of the table of learned positions: returns what the encoding adds to embedded tokens."""

    def forward(self: nn.Embedding, position_ids: Tensor) -> Tensor:
        nothing = self.weight.new_zeros(*position_ids.shape, self.embedding_dim)
        return position.embed(nothing, position_ids)

    return forward


def _attention(position: PositionEncoding) -> Callable[..., tuple[Tensor, None]]:
    """The forward of a layer's attention, which puts positions into queries and keys before the cache stores them."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoded: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        cache = kwargs.pop(CACHE, None)
        query, key, value = self.c_attn(hidden_states).unflatten(-1, (3, -1, self.head_dim)).transpose(1, 3).unbind(2)
        query, key = position(query, key, encoded, self.layer_idx)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attn_dropout.p if self.training else 0.0,
            **kwargs,
        )
        return self.resid_dropout(self.c_proj(out.flatten(2))), None

    return forward


def _padded_plan(mask: Tensor, batch: int, count: int, keys: int) -> Plan:
    """Causal attention among the consecutive real tokens of each row; padding sees nothing and is not seen."""
    if mask.shape != (batch, keys):
        raise ValueError(f"attention_mask: expected [{batch}, {keys}], got shape {tuple(mask.shape)}")
    valid = mask.bool()
    index = torch.arange(keys, device=mask.device)
    first = index.where(valid, keys).amin(1, keepdim=True)
    last = index.where(valid, -1).amax(1, keepdim=True)
    if bool((last - first + 1 > valid.sum(1, keepdim=True)).any()):
        raise ValueError("attention_mask: expected padding at the ends of rows alone, got some between their tokens")
    queries = index[keys - count :]
    valid_queries = valid[:, keys - count :]
    spans = torch.stack([first.expand(-1, count) * valid_queries, (queries + 1) * valid_queries], -1)
    return Plan(spans[:, :, None].to(torch.int32).contiguous(), keys)


def _key_positions(position_ids: Tensor, keys: int) -> Tensor:
    """Positions of all keys; those of earlier keys are counted back from the new ones."""
    earlier = keys - position_ids.shape[1]
    if not earlier:
        return position_ids
    if bool((position_ids.diff() != 1).any()):
        raise ValueError(
            "position_ids: expected to grow by 1 behind a cache for an encoding with a bias of each key, got "
            f"{position_ids.tolist()}"
        )
    steps = torch.arange(-earlier, 0, device=position_ids.device)
    # Positions below 0 are padding, which no token sees.
    return torch.cat([(position_ids[:, :1] + steps).clamp(min=0), position_ids], 1)
