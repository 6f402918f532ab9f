"""project_keys: the keys and values that a decoder layer would make of hidden states of one's own."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from gistkit import ops
from gistkit.hf.families import FAMILIES, decoder_of, rope_modules


def project_keys(
    layer: nn.Module, hidden: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Rotated keys and values [B, Hk, K, D] of hidden states, by a decoder layer's own norms and projections.

    Args:
        layer: a decoder layer of a family with RoPE that `attach` knows.
        hidden: [B, K, d], as the layer's input is: not normed.
        positions: position ids [K] or [B, K]; float64 where fractional.
        inv_freq, scaling: of the layer's RoPE, as `Keeper.leave` is given them.
    """
    parts = cast(Any, layer)
    attention = parts.self_attn
    normed = parts.input_layernorm(hidden)
    heads = (*hidden.shape[:2], -1, attention.head_dim)
    key = attention.k_proj(normed).view(heads).transpose(1, 2)
    value = attention.v_proj(normed).view(heads).transpose(1, 2)
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    rotated, _ = ops.rope(key, key[:, :0], positions, inv_freq, scaling=scaling)
    return rotated.to(value.dtype), value


def check_projects(model: nn.Module) -> None:
    """Refuses, with a TypeError, a model whose layers `project_keys` and `Keeper.leave` do not know."""
    decoder = decoder_of(model)
    if not rope_modules(decoder)[1]:
        raise TypeError(
            f"model: expected one of the families with RoPE ({', '.join(FAMILIES)}), whose layers' keys can be made of "
            f"other hidden states, got {decoder.config.model_type}"
        )
