"""Position IDs of the context and its memory tokens: DPL, UPL, CPL and EPL, and separate counters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gistkit.common.checks import at_least, one_of
from gistkit.layouts.relations import Role

SCHEMES = ("dpl", "upl", "cpl", "epl")
TASKS = ("ae", "lm", "qa")
CARRIERS = ("embedding", "kv")


class EncoderPositions(NamedTuple):
    """Position IDs in the encoder: context int64 [p]; memory int64 [k M], chunk by chunk."""

    context: NDArray[np.int64]
    memory: NDArray[np.int64]


class DecoderPositions(NamedTuple):
    """Position IDs in the decoder: memory int64 [k M], chunk by chunk; the task token's; text int64 [T]."""

    memory: NDArray[np.int64]
    task: int
    text: NDArray[np.int64]


def upl(first: int, last: int, memory: int) -> NDArray[np.int64]:
    """Position IDs that spread memory tokens evenly over the context ids they summarise.

    Computes round(linspace(first + o, last - o, memory)) with o = (r - 1) / 2 and r = (last - first + 1) / memory in
    exact integer arithmetic, ties to even. This minimises the largest distance between a context id and its nearest
    memory id, which is floor(ceil(r) / 2).

    Args:
        first: smallest context id, at least 0.
        last: largest context id, at least `first`.
        memory: number of memory tokens, at least 1; may exceed the number of context ids, ids then repeat.

    Returns:
        int64 [memory], nondecreasing.

    Paper: Position IDs Matter (EPL), Algorithm 1.
    """
    first = at_least("upl", "first", first, 0)
    last = at_least("upl", "last", last, first)
    memory = at_least("upl", "memory", memory, 1)
    length = last - first + 1
    # Python integers where the numerators would not fit into 64 bits.
    exact = object if 2 * memory * length >= 2**62 else np.int64
    numerator = (2 * np.arange(memory, dtype=exact) + 1) * length - memory
    whole = numerator // (2 * memory)
    rest = numerator - whole * (2 * memory)
    ids = whole + first
    round_up = (rest > memory) | ((rest == memory) & (ids % 2 == 1))
    return (ids + round_up).astype(np.int64)


def encoder_positions(scheme: str, context: int, chunk: int, memory: int) -> EncoderPositions:
    """Position IDs of the context tokens and of the memory tokens that follow each chunk, in the encoder.

    "dpl" and "cpl" count every chunk from 0, and its memory tokens from the chunk's end. "upl" and "epl" count the
    context from 1 through all chunks and spread the memory tokens over their own chunk. The last chunk may be shorter;
    it has `memory` memory tokens too.

    Args:
        scheme: "dpl", "upl", "cpl" or "epl"; dpl equals cpl here, and upl equals epl. They differ in the decoder.
        context: number of context tokens p, at least 1.
        chunk: chunk size L, at least 1.
        memory: memory tokens a chunk M, at least 1.

    Paper: Position IDs Matter (EPL), Tables 1-3.
    """
    one_of("encoder_positions", "scheme", scheme, SCHEMES)
    context = at_least("encoder_positions", "context", context, 1)
    chunk = at_least("encoder_positions", "chunk", chunk, 1)
    memory = at_least("encoder_positions", "memory", memory, 1)
    starts = range(0, context, chunk)
    ends = [min(start + chunk, context) for start in starts]
    ids = np.arange(context, dtype=np.int64)
    if scheme in ("dpl", "cpl"):
        blocks = [np.arange(memory) + end - start for start, end in zip(starts, ends, strict=True)]
        return EncoderPositions(ids % chunk, np.concatenate(blocks).astype(np.int64))
    blocks = [upl(start + 1, end, memory) for start, end in zip(starts, ends, strict=True)]
    return EncoderPositions(ids + 1, np.concatenate(blocks))


def decoder_positions(
    scheme: str, task: str, carrier: str, context: int, chunk: int, memory: int, text: int | None = None
) -> DecoderPositions:
    """Position IDs in the decoder: all memory tokens, then the task token, then the task's tokens.

    With "dpl" and "upl" the task token follows k M memory ids, for both carriers. With "cpl" and "epl" every token
    keeps its id of the uncompressed sequence: [AE] has 0 and the text 1..p; [LM] has p and the text continues from p +
    1.

    Args:
        scheme: "dpl", "upl", "cpl" or "epl".
        task: "ae" (reconstruct the context), "lm" (continue it) or "qa" (question and answer).
        carrier: "embedding" (ICAE: memory tokens get new positions) or "kv" (500x: keys keep the encoder's).
        context: number of context tokens p, at least 1.
        chunk: chunk size L, at least 1.
        memory: memory tokens a chunk M, at least 1.
        text: number of tokens after the task token (question and answer together), at least 0; None is `context` for
            "ae" and an error for the other tasks.

    Paper: Position IDs Matter (EPL), Tables 12-15.
    """
    name = "decoder_positions"
    one_of(name, "task", task, TASKS)
    one_of(name, "carrier", carrier, CARRIERS)
    encoder = encoder_positions(scheme, context, chunk, memory)
    if text is None:
        if task != "ae":
            raise ValueError(f"{name}: expected text, the number of tokens after the task token, for task {task!r}")
        text = context
    text = at_least(name, "text", text, 0)
    count = len(encoder.memory)
    if scheme in ("cpl", "epl"):
        # Cached keys carry the ids of the encoder; embeddings are free to take those of the uncompressed sequence.
        spread = encoder if carrier == "kv" else encoder_positions("epl", context, chunk, memory)
        memory_ids, first = spread.memory, 0 if task == "ae" else context
    else:
        memory_ids, first = encoder.memory if carrier == "kv" else np.arange(count, dtype=np.int64), count
    return DecoderPositions(memory_ids, first, np.arange(first + 1, first + 1 + text, dtype=np.int64))


def own_counter(roles: NDArray[np.integer]) -> NDArray[np.int64]:
    """Position IDs int64 [N] of roles [N]: memory tokens are counted separately from 1, other tokens from 0.

    Paper: Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool), Section 7, Table 5.
    """
    memory = roles == Role.MEMORY
    return np.where(memory, np.cumsum(memory), np.cumsum(~memory) - 1)
