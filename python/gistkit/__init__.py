"""gistkit: context compression and position layouts for transformers."""

from importlib.metadata import version

from gistkit import layouts, ops
from gistkit.layouts import Plan
from gistkit.ops import rerotate, rope

__version__ = version("gistkit")
__all__ = ["Plan", "layouts", "ops", "rerotate", "rope"]
