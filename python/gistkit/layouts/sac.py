"""SAC: some of a chunk's own tokens, its anchors, carry the memory; all tokens of a chunk see each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import SEGMENT, Role


def anchors(context: int, chunk: int, ratio: int) -> NDArray[np.int64]:
    """The places int64 [K] of the anchors: in each chunk the middle one of every `ratio` tokens, and at least one.

    Of an even number of tokens the earlier of the two in the middle.
    """
    chunks = ((start, min(start + chunk, context)) for start in range(0, context, chunk))
    middle = (ratio - 1) // 2
    return np.concatenate([np.arange(a + middle if a + middle < b else a, b, ratio) for a, b in chunks])


@example("SAC encoder, 2 chunks", context=12, chunk=6, ratio=3)
def sac(context: int, chunk: int, ratio: int) -> Layout:
    """The encoder of SAC: chunks whose tokens all see each other; MEMORY are the anchors, tokens of the context.

    Positions count the context from 1 through all chunks. The decoder is that of 500xCompressor with EPL.

    Args:
        context: number of context tokens, at least 1; the last chunk may be shorter.
        chunk: chunk size, at least 1.
        ratio: tokens of a chunk for each anchor, at least 1.

    Paper: Autoencoding-Free Context Compression for LLMs via Contextual Semantic Anchors (arXiv 2510.08907).
    """
    context = at_least("sac", "context", context, 1)
    chunk = at_least("sac", "chunk", chunk, 1)
    ratio = at_least("sac", "ratio", ratio, 1)
    roles = np.full(context, Role.CONTEXT)
    roles[anchors(context, chunk, ratio)] = Role.MEMORY
    chunk_of_both = {Role.CONTEXT: SEGMENT, Role.MEMORY: SEGMENT}
    return Layout(
        roles=roles,
        sees={Role.CONTEXT: chunk_of_both, Role.MEMORY: chunk_of_both},
        segments=(np.arange(context) // chunk).astype(np.int32),
        positions=np.arange(context) + 1,
        name=f"SAC encoder {ratio}x",
    )
