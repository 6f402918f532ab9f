"""gistkit: context compression and position layouts for transformers."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gistkit import layouts, ops
    from gistkit.layouts.layout import Layout
    from gistkit.layouts.plan import Plan
    from gistkit.ops.attention import attention, merge_attention
    from gistkit.ops.pool import window_pool
    from gistkit.ops.rope import rerotate, rope

__version__ = version("gistkit")
__all__ = ["Layout", "Plan", "attention", "layouts", "merge_attention", "ops", "rerotate", "rope", "window_pool"]


# Loaded at first use, so that gistkit.info can report a compiled part that does not load.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gistkit' has no attribute {name!r}")
    if name in ("layouts", "ops"):
        return import_module(f"gistkit.{name}")
    value = getattr(import_module("gistkit.layouts" if name in ("Layout", "Plan") else "gistkit.ops"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
