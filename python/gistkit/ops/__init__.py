"""Fused ops over layouts, as `torch.ops.gistkit.*` with Python wrappers."""

from gistkit.ops._library import best_isa, cpu_isa
from gistkit.ops.rope import rerotate, rope

__all__ = ["best_isa", "cpu_isa", "rerotate", "rope"]
