"""find_parts: the modules of a decoder that passes need to know, and the families whose forward gistkit replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """How one tested family's attention differs from Llama's, besides what its modules show.

    Args:
        window: what holds the width of a sliding window, the layer or the config; None: there are none.
        softcap: whether attention caps its logits at the layer's `attn_logit_softcapping`.
        plain_norms: whether its RMS norms multiply by their weight, in the input's dtype; Gemma's by 1 more.
    """

    window: Literal["layer", "config"] | None = None
    softcap: bool = False
    plain_norms: bool = True


# The families that are tested, by their module in transformers: what such a model needs is known. `gistkit.hf.probe`
# finds it out of others.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="config"),
    "qwen2": Family(window="layer"),
    "qwen3": Family(window="layer"),
    "gemma2": Family(window="layer", softcap=True, plain_norms=False),
    "gemma3": Family(window="layer", plain_norms=False),
}
# By name, so that only the model in use is imported.
_CLASSES = {
    f"transformers.models.{name}.modeling_{name}.{name.capitalize()}{part}": (part, family)
    for name, family in FAMILIES.items()
    for part in ("Attention", "RotaryEmbedding", "RMSNorm")
}


def _known(module: nn.Module) -> tuple[str, Family] | tuple[None, None]:
    """The part and the family whose forward a module has; (None, None) for others."""
    # A subclass with its own forward does not count.
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return _CLASSES.get(f"{owner.__module__}.{owner.__qualname__}", (None, None))


@dataclass(frozen=True, eq=False)
class Parts:
    """What passes need to know about a decoder.

    Args:
        holders: the modules whose children the other fields name: these hold until one is replaced.
        attentions: attention modules of known families, in order, with their family.
        rotaries: RoPE modules of known families.
        norms: RMS norms of known families that multiply by their weight.
        layers: the modules that hold `attentions`.
        causal: no module says that it is not causal.
        one_config: the decoder and all models in it share one configuration without sub-configurations.
        checkpointed: the modules in the decoder that have a switch for gradient checkpointing.
        guessed: `attentions`, `rotaries` and `layers` only look like those of a known family; a probe has to prove it.
    """

    holders: tuple[nn.Module, ...]
    attentions: Mapping[nn.Module, Family]
    rotaries: tuple[nn.Module, ...]
    norms: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]
    causal: bool
    one_config: bool
    checkpointed: tuple[nn.Module, ...]
    guessed: bool = False


def of_known_family(decoder: nn.Module) -> bool:
    """Whether a decoder is, with all of its attention, one of `FAMILIES`."""
    kind, layers = type(decoder), getattr(decoder.config, "num_hidden_layers", 0)
    name = kind.__module__.rpartition(".modeling_")[2]
    family = FAMILIES.get(name)
    if family is None or kind.__module__ != f"transformers.models.{name}.modeling_{name}":
        return False
    parts = find_parts(decoder)
    return not parts.guessed and len(parts.attentions) == layers and {*parts.attentions.values()} == {family}


def find_parts(decoder: nn.Module) -> Parts:
    """What passes need to know about a decoder, from a look at all its modules."""
    modules = dict(decoder.named_modules())
    attentions: dict[str, Family] = {}
    rotaries, norms = [], []
    for name, module in modules.items():
        part, family = _known(module)
        if part == "Attention" and family is not None:
            attentions[name] = family
        elif part == "RMSNorm" and family is not None:
            norms += [name] * family.plain_norms
        elif part is not None:
            rotaries.append(module)
    guessed = not attentions and not rotaries
    if guessed:
        attentions, rotaries = _alike(decoder, modules)
    switches = [name for name, module in modules.items() if name and hasattr(module, "gradient_checkpointing")]
    paths = [name.split(".") for name in [*attentions, *norms, *switches]]
    above = {".".join(parts[:depth]) for parts in paths for depth in range(len(parts))}
    config: Any = decoder.config
    models = (module for module in modules.values() if isinstance(module, PreTrainedModel))
    return Parts(
        holders=tuple(modules[name] for name in above),
        attentions={modules[name]: family for name, family in attentions.items()},
        rotaries=tuple(rotaries),
        norms=tuple(modules[name] for name in norms),
        layers=tuple(modules[name.rpartition(".")[0]] for name in attentions),
        causal=all(getattr(module, "is_causal", True) is not False for module in modules.values()),
        one_config=not config.sub_configs and all(model.config is config for model in models),
        checkpointed=tuple(modules[name] for name in switches),
        guessed=guessed,
    )


def changing(decoder: Any) -> set[str]:
    """The types of a decoder's RoPE whose frequencies depend on the length of a pass."""
    kinds = getattr(getattr(decoder, "rotary_emb", None), "rope_type", None)
    return {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds])


# What a Llama's attention and its RoPE read of themselves.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "attention_dropout", "layer_idx")
_ROTARY = ("inv_freq", "attention_scaling", "rope_type")


def _alike(decoder: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[dict[str, Family], list[nn.Module]]:
    """Attention modules by name and RoPE modules of an unknown family that are built like a Llama's."""
    rotary = getattr(decoder, "rotary_emb", None)
    attentions = {
        name: Family()
        for name, module in modules.items()
        if all(hasattr(module, part) for part in _ATTENTION)
        and name.endswith(".self_attn")
        and hasattr(modules[name.rpartition(".")[0]], "input_layernorm")
    }
    if rotary is None or not attentions or not all(hasattr(rotary, part) for part in _ROTARY):
        return {}, []
    return attentions, [rotary]
