"""Attention maps of everything that runs on the op.

Nothing here imports the ops; the recorder refers to them by name.
"""

from gistkit.inspect.recorder import AttentionMap, AttentionRecorder
from gistkit.inspect.tracking import Tracking, measure_tracking

__all__ = [
    "AttentionMap",
    "AttentionRecorder",
    "Tracking",
    "measure_tracking",
]
