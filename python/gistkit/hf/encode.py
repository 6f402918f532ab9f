"""encode_positions: transformers models with another position encoding.

A hook on the base model prepares an encoding once a pass; a hook on each layer brings it there; attention puts it into
queries and keys. A family says where its own positions come from, and how its attention gets at the encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel

from gistkit.common.checks import moved
from gistkit.hf.attach import (
    attach,
    cache_of,
    checkpoints_reentrantly,
    decoder_of,
    forwards,
    parts_of,
    pretrained,
    rope_modules,
    sliding_windows,
)
from gistkit.hf.attention import attention, mask
from gistkit.hf.cache import CACHE
from gistkit.hf.carry import layers_of
from gistkit.hf.keep import Keeper
from gistkit.layouts import Plan
from gistkit.layouts.causal import full_plan
from gistkit.nn import PositionEncoding, grid_positions
from gistkit.nn.models.block import check_position

Model = TypeVar("Model", bound=nn.Module)

# The tokens without a position that come first in vision transformers, by `model_type`: [CLS] and others.
IMAGES: dict[str, Callable[[Any], int]] = {
    "vit": lambda config: 1,
    "deit": lambda config: 2,
    "dinov2": lambda config: 1,
    "dinov2_with_registers": lambda config: 1 + config.num_register_tokens,
}
# The name under which their attention is known to transformers.
_IMAGE_ATTENTION = "gistkit_encoded"


@contextmanager
def encode_positions(model: Model, position: PositionEncoding, *, rope: bool = False) -> Iterator[Model]:
    """Replaces a model's positions by `position` inside the `with` block, and restores them afterwards.

    A GPT-2 and a vision transformer lose their learned positions; a Llama and decoders like it lose their RoPE, unless
    `rope` is set. Inside, `model(...)` also takes `embeddings`: [N, out_dim] or [B, N, out_dim], SeqPE's outputs at
    these positions if they are already computed, such as those of `SeqPERegularizer`. Otherwise SeqPE's encoder reads
    the position IDs on the CPU. Position IDs on a GPU, including a plan's, are copied, which synchronises.

    A decoder is attached (see `attach`; it takes the same keyword arguments). A cache holds keys with their positions,
    so `generate` and passes in chunks are exact; it belongs to the encoding that filled it. In `generate` the encoding
    is frozen: it computes each position once. Rows of a batch may be padded at either end, as `attention_mask` says. As
    in transformers' models, a row padded on the left has the positions of an unpadded row only if `position_ids` says
    so, as in `generate`. A vision transformer takes images of any size, and `position_ids` [N, 2] or [B, N, 2], (row,
    column) of each patch in row-major order; without them they begin at (0, 0).

    What an encoding adds to embedded tokens (`PositionEncoding.embed`) is added after the embeddings' dropout; in a
    GPT-2, before it. Run training inside the block, including the backward pass of gradient checkpointing.

    Args:
        model: a transformers GPT-2, a decoder whose attention is built like a Llama's without sliding windows and caps
            of logits, a ViT, a DeiT or, from transformers 5.18 on, a DINOv2 (with registers too), or a module with one
            in it, such as a PEFT model.
        position: for the model's heads, on its device, of 1 axis and no extra tokens for decoders, and of 2 axes for
            images, with an extra token for each that comes before the patches. Its parameters are not the model's: give
            them to the optimizer, and save them, beside it (`gistkit.nn.save_position`).
        rope: keep a decoder's RoPE; the encoding is applied to queries and keys after the rotation.

    Raises:
        TypeError: if the model is of another family, or `position` not a position encoding.
        ValueError: if `position` has other axes, extra tokens or layers than the model, or `rope` asks for one that it
            lacks.
    """
    base = cast(PreTrainedModel, pretrained(model).base_model)
    with ExitStack() as undo:
        if base.config.model_type in IMAGES:
            extra_tokens = IMAGES[base.config.model_type](base.config)
            check_position(position, axes=2, extra_tokens=extra_tokens, layers=base.config.num_hidden_layers)
            _refuse_rope(base, rope)
            undo.enter_context(_encoded_images(base, position))
        else:
            undo.enter_context(_encoded_decoder(model, position, rope))
        yield model


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoding as it is prepared for a pass, and bound to one of its layers.

    Args:
        position: the encoding.
        positions: of the tokens of the pass, as its `embed` takes them.
        prepared: of its `prepare`.
        layer: the layer's number.
        own: how the layer rotates queries and keys itself before; None: not at all.
    """

    position: PositionEncoding
    positions: Tensor
    prepared: Any
    layer: int = 0
    own: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, N, D] and keys [B, Hk, N, D] with their positions."""
        if self.own is not None:
            query, key = self.own(query, key)
        return self.position(query, key, self.prepared, self.layer)


@contextmanager
def _encoded_decoder(model: nn.Module, position: PositionEncoding, rope: bool) -> Iterator[None]:
    decoder = decoder_of(model)
    attentions = rope_modules(decoder)[0]
    gpt2 = decoder.config.model_type == "gpt2"
    if not gpt2:
        _check_family(decoder, attentions)
    check_position(position, axes=1, extra_tokens=0, layers=decoder.config.num_hidden_layers)
    with ExitStack() as undo:
        undo.enter_context(attach(model))
        # After attach's own hook, which gives a plan's position IDs.
        undo.callback(decoder.register_forward_pre_hook(partial(_prepare, position), with_kwargs=True).remove)
        if gpt2:
            _refuse_rope(decoder, rope)
            parts = cast(Any, decoder)
            own_forwards: dict[nn.Module, Any] = {parts.wpe: MethodType(partial(_embed, position), parts.wpe)}
            own_forwards |= {block.attn: MethodType(_gpt2_attention, block.attn) for block in parts.h}
            undo.enter_context(forwards(own_forwards))
            undo.enter_context(_bound(layers_of(decoder), _as_argument, embeds=False))
        else:
            undo.enter_context(_bound(parts_of(decoder).layers, _beside_rope if rope else _for_rope))
        for part in model.modules():
            if isinstance(part, GenerationMixin):
                undo.enter_context(_frozen_generate(part, position))
        yield


def _check_family(decoder: PreTrainedModel, attentions: Any) -> None:
    name = type(decoder).__name__
    if not attentions:
        raise TypeError(
            "model: expected a transformers GPT-2, a decoder whose attention is built like a Llama's, or a vision "
            f"transformer of type {', '.join(IMAGES)}, got {name}: its attention is built otherwise"
        )
    if windows := sliding_windows(decoder):
        raise TypeError(
            f"model: expected layers that see all earlier tokens, got {name} with sliding windows of "
            f"{', '.join(map(str, windows))}"
        )
    caps = {getattr(module, "attn_logit_softcapping", None) for module in attentions} - {None}
    if caps:
        raise TypeError(
            f"model: expected attention that does not cap its logits, got {name}, which caps at {caps.pop()}"
        )


def _refuse_rope(model: PreTrainedModel, rope: bool) -> None:
    if rope:
        raise ValueError(f"rope: expected False for {type(model).__name__}, which has no RoPE, got True")


@contextmanager
def _encoded_images(base: PreTrainedModel, position: PositionEncoding) -> Iterator[None]:
    AttentionInterface.register(_IMAGE_ATTENTION, _image_attention)
    AttentionMaskInterface.register(_IMAGE_ATTENTION, mask)
    table, before = cast(Any, base).embeddings, base.config._attn_implementation
    with ExitStack() as undo:
        undo.callback(base.register_forward_pre_hook(partial(_prepare_images, position), with_kwargs=True).remove)
        undo.enter_context(_bound(layers_of(base), _as_argument))
        # What the embeddings ask for their own positions, of any size.
        undo.enter_context(forwards({table: lambda hidden, *_: hidden.new_zeros(())}, "interpolate_pos_encoding"))
        base.set_attn_implementation(_IMAGE_ATTENTION)
        undo.callback(base.set_attn_implementation, before)
        yield


def _as_argument(kwargs: dict[str, Any], encoded: Encoded) -> dict[str, Any]:
    """A layer's attention gets the encoding as a keyword argument."""
    return kwargs | {"encoded": encoded}


def _for_rope(kwargs: dict[str, Any], encoded: Encoded) -> dict[str, Any]:
    """It gets the encoding in the place of its RoPE."""
    return kwargs | {"position_embeddings": encoded}


def _beside_rope(kwargs: dict[str, Any], encoded: Encoded) -> dict[str, Any]:
    return _for_rope(kwargs, replace(encoded, own=kwargs["position_embeddings"]))


Bind = Callable[[dict[str, Any], Encoded], dict[str, Any]]


@contextmanager
def _bound(layers: Iterable[nn.Module], bind: Bind, *, embeds: bool = True) -> Iterator[None]:
    """Inside, `bind` gives each layer its encoding, and the first one's input has what the encoding adds to it."""
    with ExitStack() as undo:
        for index, layer in enumerate(layers):
            hook = partial(_bind, index, bind, embeds and not index)
            undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _bind(
    index: int, bind: Bind, embeds: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook on a layer."""
    kwargs = dict(kwargs)
    encoded: Encoded | None = kwargs.pop("encoded", None)
    if encoded is None:
        raise ValueError(
            "position: expected one block of gistkit.hf.encode_positions a model, and of DINOv2 transformers 5.18 or "
            "later, got a layer that does not receive the encoding"
        )
    if embeds:
        args = (encoded.position.embed(args[0], encoded.positions), *args[1:])
    return args, bind(kwargs, replace(encoded, layer=index))


def _frozen_generate(model: Any, position: PositionEncoding) -> AbstractContextManager[None]:
    """Inside, the model's `generate` runs with the encoding frozen."""
    generate = model.generate

    @wraps(generate)
    def frozen(*args: Any, **kwargs: Any) -> Any:
        with position.frozen():
            return generate(*args, **kwargs)

    return forwards({model: frozen}, "generate")


def _check_pass(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raises a ValueError for what a pass asks for, and does not work with an encoding."""
    if checkpoints_reentrantly(model):
        raise ValueError(
            "position: expected gradient checkpointing with use_reentrant=False, got use_reentrant=True, which "
            "loses the gradients of what layers share in addition to hidden states"
        )
    keep, extend = kwargs.get("keep"), kwargs.get("extend")
    for name, value, asks in (
        ("keep", keep, keep is not None and type(keep).leave is not Keeper.leave),
        ("extend", extend, hasattr(extend, "enter")),
    ):
        if asks:
            raise ValueError(
                f"{name}: expected none that makes keys of its own under gistkit.hf.encode_positions, whose keys have "
                f"other positions, got {type(value).__name__}"
            )


def _prepare(
    position: PositionEncoding, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A hook on the decoder that prepares what its layers share: positions, biases of keys, a plan of the padding."""
    _check_pass(decoder, kwargs)
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
    new_kwargs["position_ids"] = moved(position_ids, tokens.device)
    if not position.on_host:
        position_ids = new_kwargs["position_ids"]
    if cache is not None:
        position.check_cached(position_ids)
    mask = kwargs.get("attention_mask")
    if kwargs.get("plan") is None and mask is not None and mask.dim() == 2 and not bool(mask.all()):
        new_kwargs["plan"], new_kwargs["attention_mask"] = _padded_plan(mask, batch, count, keys), None
    prepared = position.prepare(position_ids, new_kwargs.pop("embeddings", None))
    new_kwargs["encoded"] = Encoded(position, position_ids, prepared)
    dtype = torch.promote_types(decoder.dtype, torch.float32)
    if position.key_bias(position_ids[:, :0], dtype) is not None:
        if kwargs.get("memory") is not None:
            raise ValueError(
                f"memory: expected none with {type(position).__name__}, whose bias needs the positions of all "
                "keys, got one"
            )
        if cache is not None and (before := int(cache.get_seq_length())) + count != keys:
            raise ValueError(
                f"{CACHE}: expected a key of each token with {type(position).__name__}, whose bias needs the "
                f"positions of all keys, got {keys - count} keys for {before} tokens"
            )
        bias = cast(Tensor, position.key_bias(_key_positions(position_ids, keys), dtype))
        new_kwargs["key_bias"] = _added_bias(bias, kwargs.get("key_bias"))
    return args, new_kwargs


def _embed(position: PositionEncoding, self: nn.Embedding, position_ids: Tensor) -> Tensor:
    """The forward of the table of learned positions: returns what the encoding adds to embedded tokens."""
    nothing = self.weight.new_zeros(*position_ids.shape, self.embedding_dim)
    return position.embed(nothing, position_ids)


def _prepare_images(
    position: PositionEncoding, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A hook on a vision transformer that prepares what its layers share."""
    _check_pass(model, kwargs)
    if kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
        raise ValueError(
            "output_attentions: expected False under gistkit.hf.encode_positions, which stores no attention "
            "weights, got True"
        )
    pixels = args[0] if args else kwargs.get("pixel_values")
    if pixels is None:
        # Transformers raises the error.
        return args, kwargs
    new_kwargs = dict(kwargs)
    patch = cast(Any, model).embeddings.patch_embeddings.patch_size
    rows, columns = (side // each for side, each in zip(pixels.shape[-2:], patch, strict=True))
    count, positions = rows * columns, new_kwargs.pop("position_ids", None)
    if positions is None:
        positions = grid_positions(rows, columns, device="cpu" if position.on_host else pixels.device)
    elif positions.dim() not in (2, 3) or positions.shape[-2:] != (count, 2):
        raise ValueError(f"position_ids: expected [{count}, 2] or [B, {count}, 2], got shape {tuple(positions.shape)}")
    prepared = position.prepare(positions, new_kwargs.pop("embeddings", None))
    new_kwargs["encoded"] = Encoded(position, positions, prepared)
    new_kwargs["plan"] = full_plan(position.extra_tokens + count, pixels.device)
    # Otherwise some add their table without asking for it.
    new_kwargs["interpolate_pos_encoding"] = True
    return args, new_kwargs


def _image_attention(
    module: nn.Module, query: Tensor, key: Tensor, *args: Any, encoded: Encoded, **kwargs: Any
) -> tuple[Tensor, None]:
    """A vision transformer's attention, in transformers' calling convention."""
    return attention(module, *encoded(query, key), *args, **kwargs)


def _gpt2_attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    encoded: Encoded,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of a GPT-2's attention, which puts positions into queries and keys before the cache stores them."""
    cache = kwargs.pop(CACHE, None)
    query, key, value = self.c_attn(hidden_states).unflatten(-1, (3, -1, self.head_dim)).transpose(1, 3).unbind(2)
    query, key = encoded(query, key)
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


def _padded_plan(mask: Tensor, batch: int, count: int, keys: int) -> Plan:
    """Causal attention among the consecutive real tokens of each row; padding sees nothing and is not seen."""
    if mask.shape != (batch, keys):
        raise ValueError(f"attention_mask: expected [{batch}, {keys}], got shape {tuple(mask.shape)}")
    valid = mask.bool()
    index = torch.arange(keys, device=mask.device)
    first = index.where(valid, keys).amin(1, keepdim=True)
    last = index.where(valid, -1).amax(1, keepdim=True)
    if bool((last - first + 1 > valid.sum(1, keepdim=True)).any()):
        raise ValueError("attention_mask: expected padding only at the ends of rows, got some between their tokens")
    queries = index[keys - count :]
    valid_queries = valid[:, keys - count :]
    spans = torch.stack([first.expand(-1, count) * valid_queries, (queries + 1) * valid_queries], -1)
    return Plan(spans[:, :, None].to(torch.int32).contiguous(), keys)


def _added_bias(bias: Tensor, own: Tensor | Sequence[Tensor] | None) -> Tensor | Sequence[Tensor]:
    """An encoding's bias [B or 1, H, keys] with what the caller adds, in one of `attach`'s two forms."""
    if own is None or isinstance(own, Tensor):
        return bias if own is None else bias + own
    heads, keys = bias.shape[1:]
    return [bias + F.pad(part.repeat_interleave(heads // part.shape[1], 1), (0, keys - part.shape[2])) for part in own]


def _key_positions(position_ids: Tensor, keys: int) -> Tensor:
    """Positions of all keys; those of earlier keys are counted back from the new ones."""
    earlier = keys - position_ids.shape[1]
    if not earlier:
        return position_ids
    if bool((position_ids.diff() != 1).any()):
        raise ValueError(
            "position_ids: expected to grow by 1 after a cache for an encoding with a bias of each key, got "
            f"{position_ids.tolist()}"
        )
    steps = torch.arange(-earlier, 0, device=position_ids.device)
    # Positions below 0 are padding, which no token sees.
    return torch.cat([(position_ids[:, :1] + steps).clamp(min=0), position_ids], 1)
