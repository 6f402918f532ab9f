"""GistPool: a memory token after each window of the context sees that window and a few before it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.positions import own_counter
from gistkit.layouts.relations import ALL, CAUSAL, SELF, Relation, Role, older
from gistkit.layouts.relations import windows as windows_relation


def interleaved(context: int, ratio: int, text: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Roles and segments [N] of [BOS], then windows of `ratio` context tokens, each with its memory token, then text.

    Args:
        context, ratio: at least 1; the last window may be shorter.
        text: at least 0.

    Returns:
        roles; segments, the window of context and memory tokens, from 0.
    """
    memory = -(-context // ratio)
    window = np.concatenate([np.arange(context) // ratio, np.arange(memory)])
    # Logical order: a window's memory token follows its context.
    order = np.argsort(window, kind="stable")
    roles = np.concatenate(
        [[Role.BOS], np.repeat([Role.CONTEXT, Role.MEMORY], [context, memory])[order], np.repeat(Role.TEXT, text)]
    )
    return roles.astype(np.uint8), np.concatenate([[0], window[order], np.zeros(text)]).astype(np.int32)


@example("GistPool, 2 windows", context=12, ratio=3, text=5, windows=2)
def gistpool(
    context: int,
    ratio: int,
    text: int = 0,
    *,
    windows: int | None = 5,
    memory_sees_memory: bool = False,
    memory_sees_itself: bool = True,
    memory_sees_bos: bool = True,
    context_sees_memory: bool = False,
    separate_positions: bool = False,
) -> Layout:
    """GistPool: [BOS], then windows of `ratio` context tokens, each followed by its memory token, then text.

    A memory token sees BOS, itself, and the context of `windows` windows: its own and those before it. Context sees
    earlier context. Text sees BOS, memory and earlier text. Positions count all tokens from 0.

    Args:
        context: number of context tokens, at least 1; the last window may be shorter.
        ratio: context tokens a window, at least 1; a shorter context is one window.
        text: number of text tokens (question and answer), at least 0.
        windows: number of windows that a memory token sees, at least 1; None: all up to its own.
        memory_sees_memory: memory tokens also see earlier memory tokens.
        memory_sees_itself: memory tokens see themselves.
        memory_sees_bos: memory tokens see BOS.
        context_sees_memory: context tokens also see earlier memory tokens.
        separate_positions: memory tokens have their own position counter, from 1; other tokens are counted without
            them.

    The paper's Table 10 has all sixteen choices at 1 and 5 windows. GistPool at 5x in its Table 3 has the figures of
    the row with memory_sees_memory, memory_sees_itself and memory_sees_bos, as far as the columns are known. The lab's
    tables of the paper use that mask; gistpool-10 has all choices.

    Paper: Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool), Section 5.3, Table 10.
    """
    context = at_least("gistpool", "context", context, 1)
    ratio = at_least("gistpool", "ratio", ratio, 1)
    text = at_least("gistpool", "text", text, 0)
    if windows is not None:
        windows = at_least("gistpool", "windows", windows, 1)
    roles, segments = interleaved(context, ratio, text)
    # Earlier context of a memory token is its own window and all before.
    pool = CAUSAL if windows is None else windows_relation(windows)
    memory_sees: dict[Role, Relation] = {Role.CONTEXT: pool}
    if memory_sees_memory:
        memory_sees[Role.MEMORY] = CAUSAL if memory_sees_itself else older(1)
    elif memory_sees_itself:
        memory_sees[Role.MEMORY] = SELF
    if memory_sees_bos:
        memory_sees[Role.BOS] = ALL
    context_sees: dict[Role, Relation] = {Role.BOS: ALL, Role.CONTEXT: CAUSAL}
    if context_sees_memory:
        context_sees[Role.MEMORY] = CAUSAL
    return Layout(
        roles=roles,
        segments=segments,
        positions=own_counter(roles) if separate_positions else np.arange(len(roles)),
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: context_sees,
            Role.MEMORY: memory_sees,
            Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
        },
        name=f"GistPool {ratio}x",
    )
