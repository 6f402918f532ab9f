"""gistkit: context compression and position layouts for transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gistkit import ask as ask
    from gistkit import compress as compress
    from gistkit import evaluate as evaluate
    from gistkit import formats as formats
    from gistkit import hf as hf
    from gistkit import inspect, layouts, nn, ops
    from gistkit import train as train
    from gistkit import viz as viz
    from gistkit.layouts.layout import Layout
    from gistkit.layouts.plan import Plan
    from gistkit.ops.attention import attention, merge_attention
    from gistkit.ops.pool import window_pool
    from gistkit.ops.rope import rerotate, rope

__version__ = "0.1.0"
# What needs no package but torch and NumPy, so that `from gistkit import *` works everywhere.
__all__ = [
    "Layout",
    "Plan",
    "attention",
    "inspect",
    "layouts",
    "merge_attention",
    "nn",
    "ops",
    "rerotate",
    "rope",
    "window_pool",
]
_PACKAGES = ("ask", "compress", "evaluate", "formats", "hf", "inspect", "layouts", "nn", "ops", "train", "viz")


# Loaded at first use, so that gistkit.info can report a compiled part that does not load.
def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"gistkit.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'gistkit' has no attribute {name!r}")
    value = getattr(import_module("gistkit.layouts" if name in ("Layout", "Plan") else "gistkit.ops"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Without the helpers of this file.
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name not in _HELPERS)})


_HELPERS = ("Any", "TYPE_CHECKING", "_HELPERS", "_PACKAGES", "import_module")
