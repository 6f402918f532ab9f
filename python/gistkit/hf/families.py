"""The model families that attach knows: their attention and RoPE classes, a model's decoder, its sliding windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

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

    def window_of(self, attention: nn.Module) -> int | None:
        """Width of the sliding window of an attention module; None where it sees everything."""
        if self.window is None:
            return None
        holder: Any = attention if self.window == "layer" else attention.config
        return cast("int | None", holder.sliding_window)

    def softcap_of(self, attention: nn.Module) -> float | None:
        """The bound of an attention module's logits; None where its forward applies none."""
        return cast(Any, attention).attn_logit_softcapping if self.softcap else None


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


class Standing:
    """Whether the modules and parameters that some modules hold are still the same ones.

    Args:
        holders: whose own modules and parameters count, not those below these.
    """

    def __init__(self, holders: Iterable[nn.Module]) -> None:
        self._tables: list[dict[str, Any]] = []
        for module in holders:
            self._tables += [table for table in (module._modules, module._parameters) if table]
        # Held, so that no other object comes to have the id of one of them.
        self._held = [*chain.from_iterable(map(dict.values, self._tables))]
        self._ids = self._now()

    @property
    def unchanged(self) -> bool:
        """Whether each is where it was."""
        return self._now() == self._ids

    def _now(self) -> list[int]:
        # Without a loop in Python: this stands before every pass.
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]


@dataclass(frozen=True, eq=False)
class Parts:
    """What passes need of a decoder; see `parts_of`.

    Args:
        standing: of the layers, which the rest is true of.
        attentions: attention modules of known families, in order, with their family.
        rotaries: RoPE modules of known families.
        layers: the modules that hold `attentions`.
        causal: no module says that it is not causal.
        one_config: the decoder and all models in it share one configuration, which has no parts.
        checkpointed: the modules below the decoder that have a switch for gradient checkpointing.
    """

    standing: Standing
    attentions: Mapping[nn.Module, Family]
    rotaries: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]
    causal: bool
    one_config: bool
    checkpointed: tuple[nn.Module, ...]


_PARTS: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def parts_of(decoder: nn.Module) -> Parts:
    """What passes need of a decoder, found once and again only where one of its modules has been replaced."""
    parts = _PARTS.get(decoder)
    if parts is None or not parts.standing.unchanged:
        parts = _PARTS[decoder] = _find(decoder)
    return parts


def _find(decoder: nn.Module) -> Parts:
    modules = dict(decoder.named_modules())
    attentions: dict[str, Family] = {}
    rotaries = []
    for name, module in modules.items():
        part, family = _known(module)
        if part == "Attention" and family is not None:
            attentions[name] = family
        elif part is not None:
            rotaries.append(module)
    switches = [name for name, module in modules.items() if name and hasattr(module, "gradient_checkpointing")]
    paths = [name.split(".") for name in [*attentions, *switches]]
    above = {".".join(parts[:depth]) for parts in paths for depth in range(len(parts))}
    config: Any = decoder.config
    models = (module for module in modules.values() if isinstance(module, PreTrainedModel))
    return Parts(
        standing=Standing(modules[name] for name in above),
        attentions={modules[name]: family for name, family in attentions.items()},
        rotaries=tuple(rotaries),
        layers=tuple(modules[name.rpartition(".")[0]] for name in attentions),
        causal=all(getattr(module, "is_causal", True) is not False for module in modules.values()),
        one_config=not config.sub_configs and all(model.config is config for model in models),
        checkpointed=tuple(modules[name] for name in switches),
    )


def checkpointed(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder, or the decoder, for which gradient checkpointing is on."""
    return [m for m in (decoder, *parts_of(decoder).checkpointed) if getattr(m, "gradient_checkpointing", False)]


def rope_modules(decoder: PreTrainedModel) -> tuple[Mapping[nn.Module, Family], tuple[nn.Module, ...]]:
    """The attention and the RoPE modules that gistkit's forward can stand in for; both empty unless it can in all."""
    parts = parts_of(decoder)
    if not parts.rotaries or len(parts.attentions) != decoder.config.num_hidden_layers:
        return {}, ()
    return parts.attentions, parts.rotaries


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
    if getattr(decoder.config, "is_causal", True) is False or not parts_of(decoder).causal:
        raise TypeError(f"{expected}, got {name}, whose attention is not causal or reads an encoder")
    others = set(getattr(decoder.config, "layer_types", None) or ()) - set(PLAIN_LAYERS)
    if others:
        raise TypeError(f"{expected}, with layers of {' or '.join(PLAIN_LAYERS)}, got {name} with {sorted(others)}")
    return decoder


def sliding_windows(model: nn.Module) -> tuple[int, ...]:
    """The widths of the sliding windows of `model`'s layers, ascending: what to give to `compile` as `windows`.

    A TypeError if the model is none that `attach` takes.
    """
    decoder = decoder_of(model)
    attentions = parts_of(decoder).attentions
    if attentions:
        found = {family.window_of(module) for module, family in attentions.items()}
    else:
        types = getattr(decoder.config, "layer_types", None)
        # Families without layer types apply the config's window in every layer.
        slides = types is None or "sliding_attention" in types
        found = {getattr(decoder.config, "sliding_window", None)} if slides else set()
    return tuple(sorted(width for width in found if width is not None))
