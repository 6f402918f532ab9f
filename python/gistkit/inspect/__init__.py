"""Attention maps of everything that runs on the op, and the preferences of learned position encodings.

Nothing here imports the ops; the recorder refers to them by name.
"""

from gistkit.inspect.learned_positions import position_similarity, relative_bias
from gistkit.inspect.recorder import AttentionMap, AttentionRecorder
from gistkit.inspect.tracking import Tracking, line_angle, measure_tracking

__all__ = [
    "AttentionMap",
    "AttentionRecorder",
    "Tracking",
    "line_angle",
    "measure_tracking",
    "position_similarity",
    "relative_bias",
]
