"""structure and fingerprint identify the model of a memory; identity describes it in messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gistkit.hf.attach import pretrained

_DIGITS = 16
_SAMPLES = 256
_GOLDEN = 0.6180339887498949
# What quantized weights are packed in; other buffers of integers, such as positions, have 64 bits.
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32)
# Where PEFT puts what it wraps.
_ORIGINALS = ("base_layer", "original_module", "token_adapter")


def structure(model: nn.Module) -> str:
    """16 hex digits of a model's shape: two models with the same digits can read memories of the same sizes.

    A hash of the model type, hidden size, layers, heads, key heads, head dim, vocabulary and RoPE parameters.

    Args:
        model: a transformers model, or a module with one in it, such as a PEFT model.
    """
    return hashlib.sha256(json.dumps(_parts(model), sort_keys=True).encode()).hexdigest()[:_DIGITS]


def head_shapes(config: Any) -> list[tuple[int, int]]:
    """(key heads, head dim) of each layer of a text configuration; they differ in some models, such as Gemma 4."""
    layers = [config] * config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False):
        layers = list(config.per_layer_config)
    return [
        (
            getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        )
        for layer in layers
    ]


def _parts(model: nn.Module) -> dict[str, Any]:
    config = pretrained(model).config.get_text_config(decoder=True)
    # One number where all layers have the same.
    key_heads, head_dims = (
        numbers[0] if len(set(numbers)) == 1 else list(numbers) for numbers in zip(*head_shapes(config), strict=True)
    )
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_heads": key_heads,
        "head_dim": head_dims,
        "vocab_size": config.vocab_size,
        "rope": _plain(getattr(config, "rope_parameters", None)),
    }


def identity(model: nn.Module) -> dict[str, Any]:
    """JSON values that identify a model for a reader: "name", "revision" if known, and parts of its config.

    The name is that of the hub, or of the model's folder without where that is, or else the class.

    Args:
        model: as for `structure`.
    """
    base: Any = pretrained(model)
    name = str(getattr(base, "name_or_path", "") or "")
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or Path(name).is_dir():
        name = Path(name).name
    revision = getattr(base.config, "_commit_hash", None)
    return {"name": name or type(base).__name__, "revision": revision, **_parts(model)}


def differing(expected: Mapping[str, Any] | None, got: Mapping[str, Any] | None) -> tuple[str, str]:
    """Two models' names for a message, with their differences if the names are equal.

    Args:
        expected, got: as `identity` returns them; None: a model without a known name.
    """
    names = ["a model without a name" if one is None else _text(one.get("name")) for one in (expected, got)]
    if expected is not None and got is not None and names[0] == names[1]:
        differ = [key for key in ("revision", *expected) if expected.get(key) != got.get(key)]
        if differ:
            key = differ[0]
            names = [f"{names[0]} with {key} {_text(one.get(key))}" for one in (expected, got)]
    return names[0], names[1]


def _text(value: Any) -> str:
    """A value from a file, which may be anything, within a message."""
    return f"{value!r:.100}"


def _plain(value: Any) -> Any:
    """Nested parameters with all numbers as floats, so that 10000 and 10000.0 are the same; None where unset."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def fingerprint(model: nn.Module, dtype: torch.dtype = torch.float32) -> str:
    """`structure` and, after a dash, 16 hex digits of the base weights, from a few hundred values of each.

    Values are rounded to bfloat16, so that copies of one checkpoint in float32 and bfloat16 agree, on any device. A
    copy in float16 was rounded before: it has the fingerprint that the others have for that dtype.
    PEFT adapters do not count: a model has the same fingerprint with and without them.

    Args:
        model: as for `structure`.
        dtype: of a copy of the model, whose fingerprint it is; float32: the model's own.

    Raises:
        ValueError: if a weight has no values (device "meta").
    """
    return f"{structure(model)}-{digest(base_weights(model), dtype)}"


def is_of(model: nn.Module, expected: str, of_float16: str | None) -> bool:
    """Whether a model has the weights of a fingerprint: itself, as a copy in float16, or as the source of such a copy.

    Args:
        expected, of_float16: what `fingerprint` gave for the model as it was, and for float16; None: not known.
    """
    own = fingerprint(model)
    return own in (expected, of_float16) or fingerprint(model, torch.float16) == expected


def digest(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype = torch.float32) -> str:
    """16 hex digits of named weights, in any order, from a few hundred values of each, rounded to bfloat16.

    Args:
        weights: names and tensors.
        dtype: the values are rounded to this dtype first.

    Raises:
        ValueError: if a weight has no values (device "meta").
    """
    sha = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda item: item[0]):
        if weight.is_meta:
            raise ValueError(f"model: expected weights with values, got {name} on device meta")
        sha.update(f"{name} {tuple(weight.shape)}".encode())
        for part in plain_tensors(weight.detach()):
            sample = part.flatten()[_spread(part.numel()).to(part.device)]
            sha.update(sample.to("cpu", dtype).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return sha.hexdigest()[:_DIGITS]


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights without PEFT's adapters, and without its trained copies of whole layers beside the originals."""
    base = pretrained(model)
    buffers = (
        (f"{place}.{name}", buffer)
        for place, module in packed_modules(base)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    originals = {
        name: part
        for name, module in base.named_modules()
        for part in _ORIGINALS
        if module._modules.get(part) is not None
    }
    seen = set()
    for name, weight in chain(base.named_parameters(remove_duplicate=False), buffers):
        parts = name.split(".")
        inside = (originals.get(".".join(parts[:end]), parts[end]) == parts[end] for end in range(1, len(parts)))
        if id(weight) not in seen and all(inside):
            seen.add(id(weight))
            yield ".".join(part for part in parts if part not in _ORIGINALS), weight


def packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those whose weight is a buffer of packed integers, beside its scales, as GPTQ and AWQ have it."""
    for name, module in model.named_modules():
        buffers = (buffer for buffer in module._buffers.values() if buffer is not None)
        if module._parameters.get("weight") is None and any(b.dim() > 1 and b.dtype in _CODES for b in buffers):
            yield name, module


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """The tensors that a quantized weight consists of, as torchao's do; of any other weight, itself."""
    if not hasattr(weight, "__tensor_flatten__") or not hasattr(weight, "dequantize") or hasattr(weight, "device_mesh"):
        return [weight]
    parts = (getattr(weight, name) for name in weight.__tensor_flatten__()[0])
    return [plain for part in parts for plain in plain_tensors(part)]


def _spread(count: int) -> Tensor:
    """Indices below `count`, spread without regular steps, which could stay in one column of a matrix."""
    if count <= _SAMPLES:
        return torch.arange(count)
    steps = torch.arange(1, _SAMPLES + 1, dtype=torch.float64) * _GOLDEN
    return (steps.frac() * count).long()
