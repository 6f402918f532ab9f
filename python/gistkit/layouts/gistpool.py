"""GistPool: one memory token after each window of the context, which sees that window and a few before."""

from __future__ import annotations

import numpy as np

from gistkit.layouts._checks import at_least
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import ALL, CAUSAL, SELF, Relation, Role
from gistkit.layouts.relations import windows as windows_relation


def gistpool(
    context: int,
    ratio: int,
    text: int = 0,
    *,
    windows: int | None = 5,
    memory_sees_memory: bool = False,
    memory_sees_bos: bool = True,
    context_sees_memory: bool = False,
    separate_positions: bool = False,
) -> Layout:
    """GistPool: [BOS], then `ratio` context tokens and their memory token in turn, then text.

    A memory token sees BOS, itself and the context of its own window and the ones before, `windows` in all. Context
    sees earlier context. Text sees BOS, memory and earlier text. Positions count through all tokens from 0.

    Args:
        context: number of context tokens, at least 1; the last window may be shorter.
        ratio: context tokens a window, at least 1.
        text: number of text tokens (question and answer), at least 0.
        windows: number of windows a memory token sees, at least 1; None is all up to its own.
        memory_sees_memory: memory tokens see earlier memory tokens as well.
        memory_sees_bos: memory tokens see BOS.
        context_sees_memory: context tokens see earlier memory tokens as well.
        separate_positions: memory tokens have a counter of their own, from 1; the other tokens count without them.

    Paper: Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool), Section 5.3, Table 10.
    """
    context = at_least("gistpool", "context", context, 1)
    ratio = at_least("gistpool", "ratio", ratio, 1)
    text = at_least("gistpool", "text", text, 0)
    if windows is not None:
        windows = at_least("gistpool", "windows", windows, 1)
    memory = -(-context // ratio)
    window = np.concatenate([np.arange(context) // ratio, np.arange(memory)])
    # Logical order: a window's memory token follows its context.
    order = np.argsort(window, kind="stable")
    roles = np.concatenate(
        [[Role.BOS], np.repeat([Role.CONTEXT, Role.MEMORY], [context, memory])[order], np.repeat(Role.TEXT, text)]
    )
    segments = np.concatenate([[0], window[order], np.zeros(text)]).astype(np.int32)
    positions = np.arange(len(roles))
    if separate_positions:
        is_memory = roles == Role.MEMORY
        positions = np.where(is_memory, np.cumsum(is_memory), np.cumsum(~is_memory) - 1)
    # Earlier context of a memory token is its own window and all before.
    pool = CAUSAL if windows is None else windows_relation(windows)
    memory_sees: dict[Role, Relation] = {Role.CONTEXT: pool, Role.MEMORY: CAUSAL if memory_sees_memory else SELF}
    if memory_sees_bos:
        memory_sees[Role.BOS] = ALL
    context_sees: dict[Role, Relation] = {Role.BOS: ALL, Role.CONTEXT: CAUSAL}
    if context_sees_memory:
        context_sees[Role.MEMORY] = CAUSAL
    return Layout(
        roles=roles,
        segments=segments,
        positions=positions,
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: context_sees,
            Role.MEMORY: memory_sees,
            Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
        },
        name=f"GistPool {ratio}x",
    )
