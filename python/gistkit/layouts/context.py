"""The baselines of compression: text that sees the whole context, and text that sees no context."""

from __future__ import annotations

import numpy as np

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import ALL, CAUSAL, Role


@example("Full context", context=12, text=5)
def full_context(context: int, text: int = 0) -> Layout:
    """Full context: [BOS][context][text], all causal; the mask and positions of `causal`, with roles.

    Args:
        context: number of context tokens, at least 1.
        text: number of text tokens (question and answer), at least 0.

    Paper: Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool), Figure 1a.
    """
    context = at_least("full_context", "context", context, 1)
    text = at_least("full_context", "text", text, 0)
    return Layout(
        roles=np.repeat([Role.BOS, Role.CONTEXT, Role.TEXT], [1, context, text]),
        sees={
            Role.BOS: {Role.BOS: ALL},
            Role.CONTEXT: {Role.BOS: ALL, Role.CONTEXT: CAUSAL},
            Role.TEXT: {Role.BOS: ALL, Role.CONTEXT: ALL, Role.TEXT: CAUSAL},
        },
        name="full context",
    )


@example("No context", text=12)
def no_context(text: int) -> Layout:
    """No context: [BOS][text], causal; the mask and positions of `causal`, with roles.

    Args:
        text: number of text tokens (question and answer), at least 1.

    Paper: Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool), Figure 1b.
    """
    text = at_least("no_context", "text", text, 1)
    return Layout(
        roles=np.repeat([Role.BOS, Role.TEXT], [1, text]),
        sees={Role.BOS: {Role.BOS: ALL}, Role.TEXT: {Role.BOS: ALL, Role.TEXT: CAUSAL}},
        name="no context",
    )
