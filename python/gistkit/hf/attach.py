"""attach: gistkit's attention and RoPE inside a transformers model, within a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import RLock
from types import MethodType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from gistkit.hf.attention import (
    ARGUMENTS,
    all_tokens,
    attention,
    attention_forward,
    mask,
    norm_forward,
    rotary_forward,
    window_of,
)
from gistkit.hf.cache import CACHE
from gistkit.hf.carry import carry, layers_of
from gistkit.hf.keep import Keeper, LlamaRope, Rope
from gistkit.hf.parts import FAMILIES, Family, Parts, find_parts
from gistkit.hf.probe import TRAITS, Traits, traits_of
from gistkit.hf.project import OwnRope
from gistkit.layouts import Plan

ATTENTION_NAME = "gistkit"
PLAIN_LAYERS = ("full_attention", "sliding_attention")


class ModuleSnapshot:
    """The modules and parameters that some modules hold, to notice when one is replaced.

    Args:
        holders: the modules; only their direct modules and parameters count.
    """

    def __init__(self, holders: Iterable[nn.Module]) -> None:
        self._tables: list[dict[str, Any]] = []
        for module in holders:
            self._tables += [table for table in (module._modules, module._parameters) if table]
        # References, so that no other object gets the id of one of them.
        self._objects = [*chain.from_iterable(map(dict.values, self._tables))]
        self._ids = self._now()

    @property
    def unchanged(self) -> bool:
        """Whether every module and parameter is still in its place."""
        return self._now() == self._ids

    def _now(self) -> list[int]:
        # Without a loop in Python: this runs before every pass.
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]


_PARTS: WeakKeyDictionary[nn.Module, tuple[ModuleSnapshot, Parts]] = WeakKeyDictionary()


def parts_of(decoder: nn.Module) -> Parts:
    """What passes need to know about a decoder, recomputed only when one of its modules is replaced."""
    known = _PARTS.get(decoder)
    if known is None or not known[0].unchanged:
        parts = find_parts(decoder)
        known = _PARTS[decoder] = ModuleSnapshot(parts.holders), parts
    return known[1]


def checkpointed(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder, itself included, that have gradient checkpointing switched on."""
    return [m for m in (decoder, *parts_of(decoder).checkpointed) if getattr(m, "gradient_checkpointing", False)]


def rope_modules(decoder: PreTrainedModel) -> tuple[Mapping[nn.Module, Family], tuple[nn.Module, ...]]:
    """The attention and RoPE modules whose forward gistkit's replaces; both are empty unless it replaces all."""
    parts = parts_of(decoder)
    if parts.guessed and not {*map(type, parts.attentions)} <= traits_of(decoder, _attached).fused:
        return {}, ()
    return _rope_modules(decoder)


def _rope_modules(decoder: PreTrainedModel) -> tuple[Mapping[nn.Module, Family], tuple[nn.Module, ...]]:
    parts = parts_of(decoder)
    if not parts.rotaries or len(parts.attentions) != decoder.config.num_hidden_layers:
        return {}, ()
    return parts.attentions, parts.rotaries


def check_projects(model: nn.Module) -> None:
    """Raises a TypeError for a model whose layers cannot make keys of other hidden states, as `Rope.project` does."""
    decoder = decoder_of(model)
    reason = None if rope_modules(decoder)[1] else traits_of(decoder, _attached).projects
    if reason is not None:
        raise TypeError(
            "model: expected layers that compute keys of any hidden states at any positions, got "
            f"{type(decoder).__name__}: {reason}"
        )


def check_rotates(model: nn.Module) -> None:
    """Raises a TypeError for a model whose keys `gistkit.ops.rerotate` cannot move to other positions."""
    decoder = decoder_of(model)
    if not rope_modules(decoder)[1]:
        raise TypeError(
            f"model: expected a family whose attention is built like a Llama's ({', '.join(FAMILIES)} and others), so "
            f"that its keys can be rotated, got {type(decoder).__name__}: its attention is built otherwise"
        )


def frequencies_of(decoder: PreTrainedModel) -> list[Tensor] | None:
    """The frequencies [R/2] of each layer's RoPE; None if gistkit's RoPE does not run in the decoder."""
    rotary = next(iter(rope_modules(decoder)[1]), None)
    if rotary is None:
        return None
    layers = decoder.config.num_hidden_layers
    types = getattr(decoder.config, "layer_types", None)
    # Families with frequencies of each layer type name their buffers after it.
    if hasattr(rotary, "inv_freq") or types is None:
        return [cast(Tensor, rotary.inv_freq)] * layers
    return [cast(Tensor, getattr(rotary, f"{types[layer]}_inv_freq")) for layer in range(layers)]


def pretrained(model: nn.Module) -> PreTrainedModel:
    """`model`, or the transformers model in it, such as the one a PEFT model wraps. TypeError if there is none."""
    transformers_model = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if transformers_model is None:
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    return transformers_model


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The causal decoder in `model`, whose attention follows transformers' interface.

    A TypeError for encoder-decoders, attention that is not causal or that reads an encoder, and layers without full or
    sliding-window attention.
    """
    language_model = pretrained(model)
    name = type(language_model).__name__
    expected = "model: expected a transformers decoder that follows the attention interface, such as a Llama"
    if language_model.config.is_encoder_decoder:
        raise TypeError(f"{expected}, got the encoder-decoder {name}")
    decoder = cast(Any, language_model).get_decoder()
    # An attached decoder has been checked.
    if isinstance(decoder, PreTrainedModel) and decoder.config._attn_implementation == ATTENTION_NAME:
        return decoder
    if not isinstance(decoder, PreTrainedModel) or not decoder.is_backend_compatible():
        raise TypeError(f"{expected}, got {name} with attention of its own")
    if getattr(decoder.config, "is_causal", True) is False or not parts_of(decoder).causal:
        raise TypeError(f"{expected}, got {name}: its attention is not causal or reads an encoder")
    other_types = set(getattr(decoder.config, "layer_types", None) or ()) - set(PLAIN_LAYERS)
    if other_types:
        raise TypeError(
            f"{expected}, with layers of {' or '.join(PLAIN_LAYERS)}, got {name} with layers of "
            f"{' and '.join(sorted(other_types))}"
        )
    return decoder


def probed(model: nn.Module) -> Traits:
    """What a probe found out about the class and configuration of `model`'s decoder, see `gistkit.hf.probe`."""
    return traits_of(decoder_of(model), _attached)


def sliding_windows(model: nn.Module) -> tuple[int, ...]:
    """The widths of the sliding windows of `model`'s layers, ascending, for `compile`'s `windows`.

    Raises a TypeError if `attach` does not support the model.
    """
    decoder = decoder_of(model)
    attentions = parts_of(decoder).attentions
    if attentions and not parts_of(decoder).guessed:
        widths = {window_of(family, module) for module, family in attentions.items()}
    else:
        widths = set(traits_of(decoder, _attached).windows)
    return tuple(sorted(width for width in widths if width is not None))


Model = TypeVar("Model", bound=nn.Module)
# The classes of decoders that transformers has allowed to use gistkit's attention.
_ACCEPTED: set[type[PreTrainedModel]] = set()


@contextmanager
def attach(model: Model) -> Iterator[Model]:
    """Runs `model` on gistkit's attention and RoPE inside the `with` block, and restores it afterwards.

    Inside, `model(...)` takes the keyword arguments below. Gradient checkpointing runs layers again in the backward
    pass, which must then be inside the block too. Blocks may overlap, nested or in threads; the model is restored when
    the last one ends.

    - plan: a compiled layout. Its spans are the attention mask, and its positions the position IDs unless
      `position_ids` is given. Layers with a sliding window use the plan for their width: compile it with
      `windows=sliding_windows(model)`, unless all its tokens fit in the window. Without a plan attention is plain
      causal, within each layer's window.
    - memory: (key, value) per layer, [B or 1, Hk, K, D], placed before the layer's own keys and the cache's; num_keys
      of the plan includes them. Or `PackedLayers`, which the plan does not count.
    - keep: a `Keeper`, such as `KeptKeys`. Its `store` receives each layer's own rotated keys and values (with the
      cache's), and its `leave` the hidden states before and after each layer.
    - key_bias: [B or 1, Hq or 1, keys], float32 (float64 for a float64 model), added to the logits of each key in every
      layer, as by `ops.attention`; it counts all keys, memory and cache too. Or a list with one for each layer,
      [B or 1, Hk, K], of the first K keys.
    - extend: a function of (layer index, key, value), called in every layer with all its rotated keys and values
      [B, Hk, N, D], which returns those that attention runs over; num_keys of the plan counts them. Its method
      `enter`, if it has one, gets (layer index, layer, the layer's input [B, N, d], `hf.keep.Rope`) before. Gradient
      checkpointing calls `extend` again, and `enter` where it runs a layer's hooks again.
    - parts: instead of these, `hf.attention.Parts` for tokens of several rows of a cache, one after another in a pass
      of one row; `position_ids` are given.

    Args:
        model: a transformers decoder, with or without its language model head, or a module with one in it, such as a
            PEFT model. Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3 and families built like them run on gistkit's
            attention and RoPE, GPT-2 and others that follow transformers' attention interface on gistkit's attention
            and their own positions. A small copy of the model is tested first (`gistkit.hf.probe`).

    Raises:
        TypeError: if the model is an encoder-decoder, not causal or does not follow the attention interface, or if a
            small copy of it does not follow plans; from `model(...)`, if a plan, a keeper or a function has the name of
            no argument, so that the model would ignore it.
        ValueError: from `model(...)`, for output_attentions: `gistkit.inspect.AttentionRecorder` records maps.
    """
    decoder = decoder_of(model)
    with _TURN:
        # One that a user has set to gistkit's attention stays so.
        if decoder not in _BLOCKS and decoder.config._attn_implementation != ATTENTION_NAME:
            _BLOCKS[decoder] = _Blocks(_opened(decoder))
        blocks = _BLOCKS.get(decoder, _Blocks(ExitStack()))
        blocks.open += 1
    try:
        yield model
    finally:
        with _TURN:
            blocks.open -= 1
            if not blocks.open:
                _BLOCKS.pop(decoder, None)
                blocks.undo.close()


@dataclass
class _Blocks:
    """How many blocks of `attach` a decoder is in, and what the last of them undoes."""

    undo: ExitStack
    open: int = 0


_BLOCKS: WeakKeyDictionary[nn.Module, _Blocks] = WeakKeyDictionary()
_TURN = RLock()


def _opened(decoder: PreTrainedModel) -> ExitStack:
    """Attaches a decoder, or refuses it; returns what undoes that."""
    traits = TRAITS.get(decoder) or traits_of(decoder, _attached)
    if traits.refused is not None:
        raise TypeError(
            "model: expected a transformers decoder that gistkit's attention can run in, got "
            f"{type(decoder).__name__}: {traits.refused}"
        )
    undo = ExitStack()
    undo.enter_context(_attached(decoder, traits.carried, bool(rope_modules(decoder)[0])))
    return undo


@contextmanager
def _attached(decoder: PreTrainedModel, carried: bool, fused: bool) -> Iterator[None]:
    """`attach` without its checks; `carried` as in `Traits`; `fused`: with gistkit's RoPE."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)
    with ExitStack() as undo:
        undo.enter_context(_implementation(decoder))
        if carried:
            undo.enter_context(carry(decoder, ARGUMENTS))
        handle = decoder.register_forward_pre_hook(_check_and_place, with_kwargs=True)
        undo.callback(handle.remove)
        attentions, rotaries = _rope_modules(decoder) if fused else ({}, ())
        own_forwards = {module: MethodType(attention_forward(family), module) for module, family in attentions.items()}
        # A norm that keeps wider weights has a forward of its own.
        norms = [module for module in parts_of(decoder).norms if fused and "forward" not in vars(module)]
        own_forwards |= {module: MethodType(rotary_forward, module) for module in rotaries}
        own_forwards |= {module: MethodType(norm_forward, module) for module in norms}
        undo.enter_context(forwards(own_forwards))
        layers = parts_of(decoder).layers if fused else layers_of(decoder)
        for index, layer in enumerate(layers):
            rope = _llama_rope if fused else partial(_own_rope, decoder, index)
            # Before other hooks: one that shards weights again must not come first.
            undo.callback(
                layer.register_forward_hook(partial(_leave, index, rope), prepend=True, with_kwargs=True).remove
            )
            undo.callback(layer.register_forward_pre_hook(partial(_enter, index, rope), with_kwargs=True).remove)
        yield


@contextmanager
def _implementation(decoder: PreTrainedModel) -> Iterator[None]:
    """Inside, the decoder's configuration names gistkit's attention; afterwards its own again."""
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
        # The same as transformers' switch, without its walk through the model.
        decoder.config._attn_implementation = name
    else:
        decoder.set_attn_implementation(name)


def _check_and_place(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Checks the arguments that layers cannot check, and gives the decoder the plan's position IDs."""
    for name, value in kwargs.items():
        if name not in ARGUMENTS and (isinstance(value, Plan | Keeper) or callable(value)):
            raise TypeError(
                f"{name}: expected one of the arguments {', '.join(ARGUMENTS)} under gistkit.hf.attach, got "
                f"another name for an object of type {type(value).__name__}"
            )
    if kwargs.get("output_attentions", getattr(decoder.config, "output_attentions", False)):
        raise ValueError(
            "output_attentions: expected False under gistkit.hf.attach, which stores no attention weights, got True; "
            "gistkit.inspect.AttentionRecorder records attention maps"
        )
    given = [name for name in ARGUMENTS if kwargs.get(name) is not None]
    if "parts" in given and len(given) > 1:
        raise ValueError(f"{given[0]}: expected none with parts, which have their own, got one")
    plan, memory, cache = kwargs.get("plan"), kwargs.get("memory"), cache_of(kwargs)
    layers = decoder.config.num_hidden_layers
    if memory is not None and len(memory) != layers:
        raise ValueError(f"memory: expected (key, value) for each of {layers} layers, got {len(memory)}")
    bias = kwargs.get("key_bias")
    learned = bias if isinstance(bias, Tensor) and bias.requires_grad else None
    for name, value in (("memory", memory), ("keep", kwargs.get("keep")), ("key_bias", learned)):
        if value is not None and checkpoints_reentrantly(decoder):
            raise ValueError(
                f"{name}: expected gradient checkpointing with use_reentrant=False, got use_reentrant=True, which "
                "loses the gradients of what layers share in addition to hidden states"
            )
    if plan is None:
        if getattr(cache, "is_compileable", False):
            raise ValueError(
                f"{CACHE}: expected a cache that grows, such as DynamicCache, or a plan, got a static cache "
                "without a plan: which of its keys are filled is not known"
            )
        return args, kwargs
    tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        tokens = args[0] if args else kwargs.get("input_ids")
    if cache is None and kwargs.get("attention_mask") is None and tokens is not None and not tokens.is_cpu:
        # Without a mask transformers looks for packed sequences in position IDs, and waits for the answer.
        kwargs = kwargs | {"attention_mask": all_tokens(tokens.device).expand(tokens.shape[:2])}
    positions = plan.positions
    if positions is None or kwargs.get("position_ids") is not None:
        return args, kwargs
    if positions.dim() > 2:
        raise ValueError(
            f"plan: expected position IDs [N] or [B, N] for a {decoder.config.model_type} model, got "
            f"{tuple(positions.shape)} with several axes"
        )
    if positions.is_floating_point() and not hasattr(decoder, "rotary_emb"):
        raise ValueError(
            f"plan: expected whole position IDs for a {decoder.config.model_type} model, which has a table of them, "
            f"got {positions.dtype}"
        )
    return args, kwargs | {"position_ids": positions if positions.dim() == 2 else positions[None]}


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache that a model is called with, under either name; None: there is none."""
    return kwargs.get(CACHE, kwargs.get("past_key_values"))


def _llama_rope(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rope:
    return LlamaRope(*kwargs["position_embeddings"])


def _own_rope(
    decoder: PreTrainedModel, layer_idx: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Rope:
    return OwnRope.of(decoder, layer, layer_idx, args, kwargs, ARGUMENTS)


# Makes a layer's `Rope` of the arguments of a hook.
RopeOf = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Rope]


def _enter(layer_idx: int, rope: RopeOf, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook on a decoder layer that gives `extend` its input."""
    enter = getattr(kwargs.get("extend"), "enter", None)
    if enter is not None:
        before = args[0] if args else kwargs["hidden_states"]
        enter(layer_idx, layer, before, rope(layer, args, kwargs))


def _leave(
    layer_idx: int, rope: RopeOf, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """A hook on a decoder layer that gives `keep` its hidden states."""
    keep = kwargs.get("keep")
    if keep is not None and type(keep).leave is not Keeper.leave:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        keep.leave(layer_idx, layer, before, after, rope(layer, args, kwargs))


def checkpoints_reentrantly(decoder: nn.Module) -> bool:
    """Whether this pass uses reentrant checkpointing, which knows only the gradients of hidden states."""
    if not decoder.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    layer = next(iter(checkpointed(decoder)), None)
    options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    return bool(options.get("use_reentrant", False))


@contextmanager
def forwards(own_forwards: Mapping[Any, Callable[..., Any]], name: str = "forward") -> Iterator[None]:
    """Inside, instances have their own method `name`; afterwards the previous one, or the class's, again."""
    before = {module: vars(module).get(name) for module in own_forwards}
    try:
        for module, forward in own_forwards.items():
            # As a module's setter does with an attribute that is no module, parameter or buffer.
            vars(module)[name] = forward
        yield
    finally:
        for module, forward_before in before.items():
            if forward_before is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = forward_before
