"""Looking at attention: maps of everything that runs on the op, how closely they follow the context, and what learned
position encodings prefer.

Nothing here imports the ops, which the recorder knows by name.
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
