"""rerotate: a model's rotated keys, moved to other positions; and the frequencies with which a pass rotates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gistkit import ops
from gistkit.hf.attach import check_rotates, decoder_of, forwards, frequencies_of
from gistkit.hf.parts import FAMILIES


def rerotate(model: nn.Module, layer_idx: int, keys: Tensor, delta: Tensor | int) -> Tensor:
    """Keys of one layer, rotated to `delta` positions further on.

    Exact up to rounding for every RoPE type: the layer's current frequencies are used, and the keys keep their
    attention scaling.

    Args:
        model: what `attach` takes, of a family with RoPE.
        layer_idx: the layer that made the keys, from 0.
        keys: [B, Hk, K, D], rotated.
        delta: int64 [K], [B, K] or one number; may be negative.

    Raises:
        ValueError: if gistkit does not know the model's RoPE, or the model has no such layer.
    """
    inv_freqs = frequencies(model)
    if not 0 <= layer_idx < len(inv_freqs):
        raise ValueError(f"layer_idx: expected 0 to {len(inv_freqs) - 1}, got {layer_idx}")
    return ops.rerotate(keys, delta, inv_freqs[layer_idx].to(keys.device))


def check_moves(model: nn.Module) -> None:
    """Raises a TypeError for a model whose keys of any length of text cannot be moved with `rerotate`."""
    check_rotates(model)
    changing = changing_rope(model)
    if changing:
        raise TypeError(
            f"model: expected RoPE of the same frequencies at any length, got {min(changing)}, whose frequencies "
            "depend on it"
        )


def changing_rope(model: nn.Module) -> set[str]:
    """The types of the model's RoPE whose frequencies depend on the length of a pass."""
    rotary: Any = getattr(decoder_of(model), "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", "")
    return {"dynamic", "longrope"} & {*(kinds.values() if isinstance(kinds, dict) else [kinds])}


@contextmanager
def rotating_as(model: nn.Module, length: int) -> Iterator[None]:
    """Inside, RoPE whose frequencies change with the length of a pass (`changing_rope`) has those of `length`."""
    rotary: Any = decoder_of(model).rotary_emb
    own, kinds = rotary.forward, rotary.rope_type
    fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Puts the frequencies in place, where a pass of an unchanging type leaves them.
        own(x, torch.full_like(position_ids[..., :1], length - 1), *args, **kwargs)
        rotary.rope_type = fixed
        try:
            return own(x, position_ids, *args, **kwargs)
        finally:
            rotary.rope_type = kinds

    with forwards({rotary: forward}):
        yield


def frequencies(model: nn.Module) -> list[Tensor]:
    """The current frequencies [R/2] of each layer's RoPE; a ValueError if gistkit does not know the model's RoPE."""
    decoder = decoder_of(model)
    inv_freqs = frequencies_of(decoder)
    if inv_freqs is None:
        raise ValueError(
            f"model: expected one with RoPE of a known family ({', '.join(FAMILIES)}), got {decoder.config.model_type}"
        )
    return inv_freqs
