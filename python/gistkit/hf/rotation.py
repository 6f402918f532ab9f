"""rerotate: a model's rotated keys, moved to other positions."""

from __future__ import annotations

from torch import Tensor, nn

from gistkit import ops
from gistkit.hf.attach import FAMILIES, decoder_of, frequencies_of


def rerotate(model: nn.Module, layer_idx: int, keys: Tensor, delta: Tensor | int) -> Tensor:
    """Keys of one layer as if their tokens had stood `delta` positions further on.

    Exact up to rounding, whatever the model's RoPE type: the layer's frequencies are taken as the model holds them now,
    and what attention scaling the keys have they keep.

    Args:
        model: what `attach` takes, of a family with RoPE.
        layer_idx: the layer that made the keys, from 0.
        keys: [B, Hk, K, D], rotated.
        delta: int64 [K], [B, K] or one number; may be negative.

    Raises:
        ValueError: if the model has no RoPE that gistkit knows, or no such layer.
    """
    inv_freqs = frequencies(model)
    if not 0 <= layer_idx < len(inv_freqs):
        raise ValueError(f"layer_idx: expected 0 to {len(inv_freqs) - 1}, got {layer_idx}")
    return ops.rerotate(keys, delta, inv_freqs[layer_idx].to(keys.device))


def frequencies(model: nn.Module) -> list[Tensor]:
    """The frequencies [R/2] of each layer's RoPE, as the model holds them now; a ValueError if it has none known."""
    decoder = decoder_of(model)
    inv_freqs = frequencies_of(decoder)
    if inv_freqs is None:
        raise ValueError(
            f"model: expected one with RoPE of a known family ({', '.join(FAMILIES)}), got {decoder.config.model_type}"
        )
    return inv_freqs
