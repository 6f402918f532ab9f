"""rerotate: a model's rotated keys, moved to other positions."""

from __future__ import annotations

from torch import Tensor, nn

from gistkit import ops
from gistkit.hf.families import FAMILIES, decoder_of, rope_of


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
    return ops.rerotate(keys, delta, frequencies(model, layer_idx).to(keys.device))


def frequencies(model: nn.Module, layer_idx: int) -> Tensor:
    """The frequencies [R/2] of one layer's RoPE, as the model holds them now; errors as in `rerotate`."""
    decoder = decoder_of(model)
    layers = decoder.config.num_hidden_layers
    if not 0 <= layer_idx < layers:
        raise ValueError(f"layer_idx: expected 0 to {layers - 1}, got {layer_idx}")
    rope = rope_of(decoder, layer_idx)
    if rope is None:
        raise ValueError(
            f"model: expected one with RoPE of a known family ({', '.join(FAMILIES)}), got {decoder.config.model_type}"
        )
    return rope[0]
