"""Dodo: selected tokens of the text, its nuggets, stand for the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gistkit._checks import at_least
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import ALL, CAUSAL, Relation, Role, recent, windows_causal


def dodo(selected: ArrayLike, tau: int, *, segment: int = 1, bos: bool = False) -> Layout:
    """Dodo's mixed resolution: a token sees all the last `tau` tokens, itself included, and the nuggets before those.

    Nuggets have role MEMORY, the other tokens CONTEXT; every token keeps its own position.

    Args:
        selected: bool [N], True at the nuggets, N at least 1.
        tau: number of most recent tokens seen uncompressed, at least 1.
        segment: the tokens of a segment share where the uncompressed part begins (Section 2.2, Learning): `segment`
            tokens each, of which a token sees its own and the `tau / segment` - 1 segments before, so that it sees
            tau - segment + 1 to tau tokens uncompressed. Divides tau.
        bos: the first token has role BOS, which all see and which is no nugget.

    Paper: Dodo, Equations 9 and 10.
    """
    chosen = np.asarray(selected)
    if chosen.dtype != bool:
        raise TypeError(f"dodo: expected selected of dtype bool, got {chosen.dtype}")
    if chosen.ndim != 1 or not chosen.size:
        raise ValueError(f"dodo: expected selected of shape [N] with N >= 1, got shape {chosen.shape}")
    tau, segment = check_segment(tau, segment)
    roles = np.where(chosen, Role.MEMORY, Role.CONTEXT)
    sees: dict[Role, Relation] = {Role.CONTEXT: windows_causal(tau // segment) if segment > 1 else recent(tau)}
    sees[Role.MEMORY] = CAUSAL
    table = {Role.CONTEXT: sees, Role.MEMORY: sees}
    if bos:
        roles[0] = Role.BOS
        sees[Role.BOS] = ALL
        table[Role.BOS] = {Role.BOS: ALL}
    segments = (np.arange(len(chosen)) // segment).astype(np.int32)
    return Layout(roles=roles, segments=segments, sees=table, name="Dodo")


def check_segment(tau: int, segment: int) -> tuple[int, int]:
    """(tau, segment) as ints: how many tokens are seen uncompressed, and how many share where those begin."""
    tau = at_least("dodo", "tau", tau, 1)
    segment = at_least("dodo", "segment", segment, 1)
    if tau % segment:
        raise ValueError(f"dodo: expected tau to be a multiple of segment, {segment}, got {tau}")
    return tau, segment
