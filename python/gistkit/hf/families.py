"""The model families that attach knows: their attention and RoPE classes, a model's decoder, its sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

ATTENTION_NAME = "gistkit"
PLAIN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """How one family's attention differs from Llama's, apart from what its modules show.

    Args:
        prefix: of its classes' names in transformers.
        window: who holds the width of a sliding window, the layer, the config, or None: nobody.
        softcap: its attention caps its logits at the layer's `attn_logit_softcapping`.
    """

    prefix: str
    window: Literal["layer", "config"] | None = None
    softcap: bool = False


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window="config"),
    "qwen2": Family("Qwen2", window="layer"),
    "qwen3": Family("Qwen3", window="layer"),
    "gemma2": Family("Gemma2", window="layer", softcap=True),
    "gemma3": Family("Gemma3", window="layer"),
}
# By name, so that no model's code is loaded for another one's sake.
_CLASSES = {
    f"transformers.models.{name}.modeling_{name}.{family.prefix}{part}": (part, family)
    for name, family in FAMILIES.items()
    for part in ("Attention", "RotaryEmbedding")
}


def _known(module: nn.Module) -> tuple[str, Family] | tuple[None, None]:
    """Which part of which family a module is, as far as its forward goes."""
    # A subclass with a forward of its own is not what the table stands for.
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return _CLASSES.get(f"{owner.__module__}.{owner.__qualname__}", (None, None))


def _parts(decoder: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """All attention and all RoPE modules of known families."""
    found: dict[str, list[nn.Module]] = {"Attention": [], "RotaryEmbedding": []}
    for module in decoder.modules():
        part, _ = _known(module)
        if part is not None:
            found[part].append(module)
    return found["Attention"], found["RotaryEmbedding"]


def rope_modules(decoder: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """The attention and the RoPE modules that gistkit's forward can stand in for; both empty unless it can in all."""
    attentions, rotaries = _parts(decoder)
    if not rotaries or len(attentions) != decoder.config.num_hidden_layers:
        return [], []
    return attentions, rotaries


def frequencies_of(decoder: PreTrainedModel) -> list[Tensor] | None:
    """The frequencies [R/2] of each layer's RoPE; None where there is none of gistkit's."""
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
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    return found


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The causal decoder in `model`, whose attention follows transformers' interface; a TypeError that says what came.

    Refused are encoder-decoders, attention that looks ahead or across, and layers other than of full or sliding-window
    attention.
    """
    whole = pretrained(model)
    name = type(whole).__name__
    expected = "model: expected a transformers decoder that follows the attention interface, such as a Llama"
    if whole.config.is_encoder_decoder:
        raise TypeError(f"{expected}, got the encoder-decoder {name}")
    decoder = cast(Any, whole).get_decoder()
    # What attach has taken was checked then.
    if isinstance(decoder, PreTrainedModel) and decoder.config._attn_implementation == ATTENTION_NAME:
        return decoder
    if not isinstance(decoder, PreTrainedModel) or not decoder.is_backend_compatible():
        raise TypeError(f"{expected}, got {name} with attention of its own")
    if any(getattr(holder, "is_causal", True) is False for holder in (decoder.config, *decoder.modules())):
        raise TypeError(f"{expected}, got {name}, whose attention is not causal or reads an encoder")
    others = set(getattr(decoder.config, "layer_types", None) or ()) - set(PLAIN_LAYERS)
    if others:
        raise TypeError(f"{expected}, with layers of {' or '.join(PLAIN_LAYERS)}, got {name} with {sorted(others)}")
    return decoder


def window_of(attention: nn.Module) -> int | None:
    """Width of the sliding window of an attention module of a known family; None where it sees everything."""
    _, family = _known(attention)
    if family is None or family.window is None:
        return None
    holder: Any = attention if family.window == "layer" else attention.config
    return cast("int | None", holder.sliding_window)


def softcap_of(attention: nn.Module) -> float | None:
    """The bound of an attention module's logits; None where its forward applies none."""
    _, family = _known(attention)
    return cast(Any, attention).attn_logit_softcapping if family is not None and family.softcap else None


def sliding_windows(model: nn.Module) -> tuple[int, ...]:
    """The widths of the sliding windows of `model`'s layers, ascending: what to give to `compile` as `windows`.

    A TypeError if the model is none that `attach` takes.
    """
    decoder = decoder_of(model)
    attentions, _ = _parts(decoder)
    if attentions:
        found = {window_of(module) for module in attentions}
    else:
        types = getattr(decoder.config, "layer_types", None)
        # Families without layer types apply the config's window in every layer.
        slides = types is None or "sliding_attention" in types
        found = {getattr(decoder.config, "sliding_window", None)} if slides else set()
    return tuple(sorted(width for width in found if width is not None))
