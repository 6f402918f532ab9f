"""Fused ops over layouts, as `torch.ops.gistkit.*` with Python wrappers."""

from gistkit.ops import reference
from gistkit.ops._library import best_isa, cpu_isa
from gistkit.ops.attention import attention, merge_attention
from gistkit.ops.dropped import attention_with_dropout
from gistkit.ops.pool import window_pool
from gistkit.ops.rope import rerotate, rope
from gistkit.ops.trie import ancestor_attention, bias_gelu, trie_mix

__all__ = [
    "ancestor_attention",
    "attention",
    "attention_with_dropout",
    "best_isa",
    "bias_gelu",
    "cpu_isa",
    "merge_attention",
    "reference",
    "rerotate",
    "rope",
    "trie_mix",
    "window_pool",
]
