"""AvgPool: the text sees the mean of each window instead of the window."""

from __future__ import annotations

import numpy as np

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.gistpool import interleaved
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import ALL, CAUSAL, SEGMENT, Role


@example("AvgPool", context=12, ratio=3, text=5)
def avgpool(context: int, ratio: int, text: int = 0) -> Layout:
    """AvgPool: [BOS], then windows of `ratio` context tokens, each followed by its mean as a memory token, then text.

    A memory token is not an input of the model: in each layer it is the mean over its own window. The first pass
    therefore runs the layout without memory and text, and the second pass the layout without context (see
    `Layout.take`). Text sees BOS, memory and earlier text. Context has positions 1 to n, a memory token the mean of its
    window's positions, and text the positions from n + 1. With ratio 1 the text reads exactly what it reads in
    `full_context`.

    Args:
        context: number of context tokens n, at least 1; the last window may be shorter.
        ratio: context tokens a window, at least 1; a shorter context is one window.
        text: number of text tokens (question and answer), at least 0.

    Returns:
        A Layout with positions in float64, as the mean of a window may be fractional.

    Paper: Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool), Section 4.
    """
    context = at_least("avgpool", "context", context, 1)
    ratio = at_least("avgpool", "ratio", ratio, 1)
    text = at_least("avgpool", "text", text, 0)
    roles, segments = interleaved(context, ratio, text)
    memory = roles == Role.MEMORY
    first = np.arange(0, context, ratio) + 1
    last = np.minimum(first + ratio - 1, context)
    positions = np.empty(len(roles))
    positions[~memory] = np.arange(1 + context + text)
    positions[memory] = (first + last) / 2
    return Layout(
        roles=roles,
        segments=segments,
        positions=positions,
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: {Role.BOS: ALL, Role.CONTEXT: CAUSAL},
            Role.MEMORY: {Role.CONTEXT: SEGMENT},
            Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
        },
        name=f"AvgPool {ratio}x",
    )
