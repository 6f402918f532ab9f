"""Fused ops over layouts, as `torch.ops.gistkit.*` with Python wrappers."""

from gistkit.ops import reference
from gistkit.ops._library import best_isa, cpu_isa
from gistkit.ops.attention import attention, merge_attention
from gistkit.ops.pool import window_pool
from gistkit.ops.rope import rerotate, rope

__all__ = ["attention", "best_isa", "cpu_isa", "merge_attention", "reference", "rerotate", "rope", "window_pool"]
