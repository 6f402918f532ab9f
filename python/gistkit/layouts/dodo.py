"""Dodo: some of the text's own tokens stand for the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gistkit.layouts._checks import at_least
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import CAUSAL, Role, recent


def dodo(selected: ArrayLike, tau: int) -> Layout:
    """Dodo's mixed resolution: a token sees all the last `tau` tokens, itself included, and the nuggets before those.

    Nuggets have role MEMORY, the other tokens CONTEXT; every token keeps its own position.

    Args:
        selected: bool [N], True at the nuggets, N at least 1.
        tau: number of most recent tokens seen uncompressed, at least 1.

    Paper: Dodo, Equation 11.
    """
    chosen = np.asarray(selected)
    if chosen.dtype != bool:
        raise TypeError(f"dodo: expected selected of dtype bool, got {chosen.dtype}")
    if chosen.ndim != 1 or not chosen.size:
        raise ValueError(f"dodo: expected selected of shape [N] with N >= 1, got shape {chosen.shape}")
    tau = at_least("dodo", "tau", tau, 1)
    sees = {Role.MEMORY: CAUSAL, Role.CONTEXT: recent(tau)}
    return Layout(
        roles=np.where(chosen, Role.MEMORY, Role.CONTEXT), sees={Role.CONTEXT: sees, Role.MEMORY: sees}, name="Dodo"
    )
