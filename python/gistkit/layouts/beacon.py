"""Beacon: chunks whose tokens see their own chunk, and of the chunks before it only the memory tokens."""

from __future__ import annotations

import numpy as np

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.gistpool import interleaved
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import ALL, CAUSAL, SEGMENT_CAUSAL, Role


@example("Beacon, 2 chunks", context=12, ratio=3, text=5, segment=6)
def beacon(context: int, ratio: int, text: int = 0, *, segment: int = 2048) -> Layout:
    """Beacon: [BOS], then units of `ratio` context tokens, each followed by its memory token, then text.

    Chunks are whole units. Context and memory tokens see BOS, earlier tokens of their own chunk, and all earlier memory
    tokens. Text sees BOS, memory and earlier text. Positions count all tokens from 0.

    Args:
        context: number of context tokens, at least 1; the last unit may be shorter.
        ratio: context tokens a unit, at least 1; a shorter context is one unit.
        text: number of text tokens (question and answer), at least 0.
        segment: context tokens of a chunk at most, at least 1; a chunk has at least one unit.

    Paper: Long Context Compression with Activation Beacon (2401.03462).
    """
    context = at_least("beacon", "context", context, 1)
    ratio = at_least("beacon", "ratio", ratio, 1)
    text = at_least("beacon", "text", text, 0)
    segment = at_least("beacon", "segment", segment, 1)
    roles, units = interleaved(context, ratio, text)
    earlier = {Role.BOS: ALL, Role.CONTEXT: SEGMENT_CAUSAL, Role.MEMORY: CAUSAL}
    return Layout(
        roles=roles,
        segments=units // max(1, segment // ratio),
        positions=np.arange(len(roles)),
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: earlier,
            Role.MEMORY: earlier,
            Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
        },
        name=f"Beacon {ratio}x",
    )
