"""Gist: memory tokens after the context; the text sees only those."""

from __future__ import annotations

from math import ceil, isfinite

import numpy as np

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.positions import own_counter
from gistkit.layouts.relations import ALL, CAUSAL, Role


@example("Gist", context=12, ratio=3, text=5)
def gist(
    context: int,
    ratio: float | None = None,
    text: int = 0,
    *,
    memory: int | None = None,
    separate_positions: bool = False,
) -> Layout:
    """Gist: [BOS][context][memory][text]; memory sees all of the context, text sees memory and not the context.

    All tokens see BOS. Positions count all tokens from 0. This is also the layout of OffsetGist, SepGist and
    SepOffsetGist: reading a layer's outputs at the memory tokens instead of its inputs (offset), and separate
    parameters for memory tokens (separate), change neither the mask nor the position IDs.

    Args:
        context: number of context tokens n, at least 1.
        ratio: compression ratio r, at least 1; there are ceil(n / r) memory tokens, one if n < r. Give this or
            `memory`.
        text: number of text tokens (question and answer), at least 0.
        memory: number of memory tokens, at least 1.
        separate_positions: memory tokens have their own position counter, from 1; other tokens are counted without
            them.

    Papers: Learning to Compress Prompts with Gist Tokens; Long Context In-Context Compression by Getting to the Gist
    of Gisting (GistPool), Sections 3 and 5.1-5.2, Table 5.
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
    roles = np.repeat([Role.BOS, Role.CONTEXT, Role.MEMORY, Role.TEXT], [1, context, memory, text])
    return Layout(
        roles=roles,
        positions=own_counter(roles) if separate_positions else np.arange(len(roles)),
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: {Role.BOS: ALL, Role.CONTEXT: CAUSAL},
            Role.MEMORY: {Role.BOS: ALL, Role.CONTEXT: ALL, Role.MEMORY: CAUSAL},
            Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
        },
        name="gist",
    )
