"""Plain-torch forms of the ops, of the same signatures: the oracle of the tests and the baseline of the benchmarks."""

from gistkit.ops.reference.attention import attention, dense_mask
from gistkit.ops.reference.pool import window_pool
from gistkit.ops.reference.rope import rope

__all__ = ["attention", "dense_mask", "rope", "window_pool"]
