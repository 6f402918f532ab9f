"""Reads keys and values back out of the blocks of vLLM's cache, in whichever order a backend writes them there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What one write tells apart: whole numbers that the shortest dtype of caches has, bfloat16.
_BITS = 7


def order(layer: Any, dtype: torch.dtype, heads: int, size: int) -> Tensor:
    """Where a block holds [key and value, tokens, heads, size]: indices, found by writing those into one of zeros.

    Args:
        layer: an attention layer, whose `kv_cache` is [blocks, ...] with the tokens of a block at dimension 2.
        dtype: of keys and values.

    Raises:
        ValueError: if it does not hold each number of them once, as it is.
    """
    block = torch.zeros_like(layer.kv_cache[:1])
    tokens, device = block.shape[2], block.device
    numbers = torch.arange(2 * tokens * heads * size, device=device).view(2, tokens, heads, size)
    found = torch.zeros(block.numel(), dtype=torch.long, device=device)
    for shift in range(0, numbers.numel().bit_length(), _BITS):
        key, value = (numbers >> shift & (1 << _BITS) - 1).to(dtype)
        layer.impl.do_kv_cache_update(layer, key, value, block, torch.arange(tokens, device=device))
        found += block.flatten().long() << shift
    places = found.argsort()
    if not torch.equal(found[places], numbers.flatten()):
        raise ValueError(f"kv_cache: expected keys and values as they are, got other contents in {tuple(block.shape)}")
    return places


def read(cache: Tensor, places: Tensor, slots: Tensor, heads: int, size: int) -> Tensor:
    """Keys and values [2, tokens, heads, size] of tokens that begin at a block.

    Args:
        cache: a layer's, [blocks, ...].
        places: what `order` gives.
        slots: of the tokens in the cache.
    """
    tokens = cache.shape[2]
    blocks = cache[slots[::tokens] // tokens].flatten(1)[:, places]
    return blocks.view(len(blocks), 2, tokens, heads, size).transpose(0, 1).flatten(1, 2)[:, : len(slots)]
