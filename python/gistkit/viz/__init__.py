"""Pictures (`pip install gistkit[viz]`).

Every drawing function returns a figure, which notebooks show, and opens no window. Functions with one panel also take
matplotlib axes, `ax=`, and then return these.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("gistkit's pictures need matplotlib, which is missing: pip install gistkit[viz]") from error

from gistkit.viz.attention import draw_attention, draw_memory_attention, draw_memory_map
from gistkit.viz.gallery import draw_gallery
from gistkit.viz.layout import draw_layout
from gistkit.viz.run import draw_training_run
from gistkit.viz.savings import draw_savings

__all__ = [
    "draw_attention",
    "draw_gallery",
    "draw_layout",
    "draw_memory_attention",
    "draw_memory_map",
    "draw_savings",
    "draw_training_run",
]
