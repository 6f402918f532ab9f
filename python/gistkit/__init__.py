"""gistkit: context compression and position layouts for transformers."""

from importlib.metadata import version

from gistkit import layouts, ops
from gistkit.layouts import Plan
from gistkit.ops import attention, merge_attention, rerotate, rope

__version__ = version("gistkit")
__all__ = ["Plan", "attention", "layouts", "merge_attention", "ops", "rerotate", "rope"]
