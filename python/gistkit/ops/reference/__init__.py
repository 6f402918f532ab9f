"""Plain-torch forms of the ops, of the same signatures: the oracle of the tests and the baseline of the benchmarks."""

from gistkit.ops.reference.attention import attention, dense_mask
from gistkit.ops.reference.pool import window_pool
from gistkit.ops.reference.rope import rope
from gistkit.ops.reference.trie import ancestor_attention, bias_gelu, trie_mix

__all__ = ["ancestor_attention", "attention", "bias_gelu", "dense_mask", "rope", "trie_mix", "window_pool"]
