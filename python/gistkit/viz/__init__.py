"""Pictures (`pip install gistkit[viz]`). Every function returns a figure and opens no window."""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("gistkit's pictures need matplotlib, which is missing: pip install gistkit[viz]") from error

from gistkit.ops.recorder import AttentionRecorder as AttentionRecorder  # beside what draws its maps
