"""Gist: memory tokens after the context, and text that sees only those."""

from __future__ import annotations

from math import ceil, isfinite

import numpy as np

from gistkit.layouts._checks import at_least
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import ALL, CAUSAL, Role


def gist(context: int, ratio: float | None = None, text: int = 0, *, memory: int | None = None) -> Layout:
    """Gist: [BOS][context][memory][text]; memory sees all of the context, text sees memory and not the context.

    Positions count through all tokens from 0.

    Args:
        context: number of context tokens n, at least 1.
        ratio: compression ratio r, at least 1; there are ceil(n / r) memory tokens. Give this or `memory`.
        text: number of text tokens (question and answer), at least 0.
        memory: number of memory tokens, at least 1.

    Papers: Learning to Compress Prompts with Gist Tokens; Long Context In-Context Compression by Getting to the Gist
    of Gisting (GistPool), Section 3.
    """
    context = at_least("gist", "context", context, 1)
    text = at_least("gist", "text", text, 0)
    if (ratio is None) == (memory is None):
        raise ValueError(f"gist: expected either ratio or memory, got ratio {ratio} and memory {memory}")
    if ratio is not None:
        if not (isfinite(ratio) and ratio >= 1):
            raise ValueError(f"gist: expected ratio >= 1, got {ratio}")
        memory = ceil(context / ratio)
    memory = at_least("gist", "memory", memory, 1)  # type: ignore[arg-type]
    return Layout(
        roles=np.repeat([Role.BOS, Role.CONTEXT, Role.MEMORY, Role.TEXT], [1, context, memory, text]),
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: {Role.BOS: ALL, Role.CONTEXT: CAUSAL},
            Role.MEMORY: {Role.BOS: ALL, Role.CONTEXT: ALL, Role.MEMORY: CAUSAL},
            Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
        },
        name="gist",
    )
