"""ICAE and 500xCompressor: an encoder of chunks into memory tokens, and the decoder that reads them."""

from __future__ import annotations

import numpy as np

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.positions import decoder_positions, encoder_positions
from gistkit.layouts.relations import CAUSAL, SEGMENT, SEGMENT_CAUSAL, Role


@example("ICAE encoder, 2 chunks, EPL", context=12, chunk=6, memory=2)
def icae_encoder(context: int, chunk: int, memory: int, positions: str = "epl") -> Layout:
    """The encoder of ICAE and 500xCompressor: each chunk, then its memory tokens; chunks do not see each other.

    Args:
        context: number of context tokens, at least 1; the last chunk may be shorter.
        chunk: chunk size, at least 1.
        memory: memory tokens a chunk, at least 1.
        positions: "dpl", "upl", "cpl" or "epl", see `encoder_positions`.

    Papers: In-context Autoencoder; 500xCompressor; positions: Position IDs Matter (EPL), Tables 1-3.
    """
    ids = encoder_positions(positions, context, chunk, memory)
    chunks = len(ids.memory) // memory
    segments = np.concatenate([np.arange(context) // chunk, np.arange(chunks * memory) // memory])
    roles = np.repeat([Role.CONTEXT, Role.MEMORY], [context, chunks * memory])
    # Logical order: a chunk's memory tokens follow its context.
    order = np.argsort(segments, kind="stable")
    return Layout(
        roles=roles[order],
        sees={
            Role.CONTEXT: {Role.CONTEXT: SEGMENT_CAUSAL},
            Role.MEMORY: {Role.CONTEXT: SEGMENT, Role.MEMORY: SEGMENT_CAUSAL},
        },
        segments=segments[order],
        positions=np.concatenate(ids)[order],
        name=f"ICAE encoder, {positions.upper()}",
    )


@example("ICAE decoder, 1 chunk, DPL", context=12, chunk=12, memory=4, positions="dpl")
@example("ICAE decoder, 2 chunks, EPL", context=12, chunk=6, memory=2)
def decoder(
    context: int,
    chunk: int,
    memory: int,
    *,
    task: str = "ae",
    carrier: str = "embedding",
    positions: str = "epl",
    text: int | None = None,
    question: int = 0,
) -> Layout:
    """The decoder of ICAE and 500xCompressor: memory tokens of all chunks, the task token, then text; all causal.

    With carrier "kv" the memory tokens are cached keys, not queries: compile with `queries=slice(k M, None)`.

    Args:
        context: number of compressed context tokens, at least 1.
        chunk: chunk size, at least 1.
        memory: memory tokens a chunk, at least 1.
        task: "ae", "lm" or "qa"; sets the task token and the position IDs after it.
        carrier: "embedding" (ICAE) or "kv" (500x).
        positions: "dpl", "upl", "cpl" or "epl", see `decoder_positions`.
        text: number of tokens after the task token and the question, at least 0; None is `context` for task "ae".
        question: number of question tokens before the text, at least 0; for task "qa".

    Papers: In-context Autoencoder; 500xCompressor; positions: Position IDs Matter (EPL), Tables 12-15.
    """
    question = at_least("decoder", "question", question, 0)
    if question and task != "qa":
        raise ValueError(f"decoder: expected question to be 0 for task {task!r}, got {question}")
    if text is not None:
        text = at_least("decoder", "text", text, 0) + question
    ids = decoder_positions(positions, task, carrier, context, chunk, memory, text)
    count = len(ids.memory)
    segments = np.zeros(count + 1 + len(ids.text), np.int32)
    segments[:count] = np.arange(count) // memory
    past = {Role.MEMORY: CAUSAL, Role.TASK: CAUSAL, Role.TEXT: CAUSAL}
    return Layout(
        roles=np.repeat([Role.MEMORY, Role.TASK, Role.TEXT], [count, 1, len(ids.text)]),
        sees={Role.MEMORY: {Role.MEMORY: CAUSAL}, Role.TASK: past, Role.TEXT: past},
        segments=segments,
        positions=np.concatenate([ids.memory, [ids.task], ids.text]),
        name=f"{'ICAE' if carrier == 'embedding' else '500x'} decoder, {task.upper()}, {positions.upper()}",
    )
