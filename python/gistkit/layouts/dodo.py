"""Dodo: selected tokens of the text, its nuggets, represent the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.plan import Plan
from gistkit.layouts.relations import ALL, CAUSAL, Relation, Role, recent, windows_causal


@example("Dodo, mixed resolution", selected=np.isin(np.arange(18), (3, 5, 8, 12)), tau=6, bos=True)
def dodo(selected: ArrayLike, tau: int, *, segment: int = 1, bos: bool = False) -> Layout:
    """Dodo's mixed resolution: a token sees all the last `tau` tokens, itself included, and the nuggets before those.

    Nuggets have role MEMORY, the other tokens CONTEXT; every token keeps its own position.

    Args:
        selected: bool [N], True at the nuggets, N at least 1.
        tau: number of most recent tokens seen uncompressed, at least 1.
        segment: the `segment` tokens of a segment share the start of their uncompressed part (Section 2.2, Learning). A
            token sees its own segment and the `tau / segment` - 1 before it, which are tau - segment + 1 to tau
            uncompressed tokens. Divides tau.
        bos: the first token has role BOS, which is visible to all and is not a nugget.

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
    """Checked (tau, segment) as ints: how many tokens are seen uncompressed, and how many share the start of these."""
    tau = at_least("dodo", "tau", tau, 1)
    segment = at_least("dodo", "segment", segment, 1)
    if tau % segment:
        raise ValueError(f"dodo: expected tau to be a multiple of segment, {segment}, got {tau}")
    return tau, segment


def nuggets_of(plan: Plan) -> slice:
    """The last rows of a plan of `dodo` layouts, those of nuggets."""
    rows = plan.num_queries
    return (plan.slices or {}).get(Role.MEMORY, slice(rows, rows))


def with_nuggets_again(plan: Plan, tau: int, segment: int) -> Plan:
    """The plan of the same rows over N + K keys: all N keys, followed by the K nuggets' keys again.

    A row reads the nuggets before its uncompressed part from the last K keys, and nuggets inside its uncompressed part
    from their original place. A `key_bias` on the last K keys therefore applies exactly where a token is read as a
    nugget (Equations 9, 10, 18).

    Args:
        plan: of `dodo` layouts, one document per row, in grouped order; with `aligned` for several rows.
        tau, segment: those of the layouts.
    """
    rows, nuggets = plan.num_queries, nuggets_of(plan)
    order = np.arange(rows)[None] if plan.order is None else plan.order.cpu().numpy()
    first = np.maximum(0, order // segment * segment - (tau - segment))
    # Each row's nuggets ascend, with its padding after them.
    older = np.stack([np.searchsorted(row[nuggets], limits) for row, limits in zip(order, first, strict=True)])

    def split(spans: Tensor) -> Tensor:
        return torch.from_numpy(_older_moved(spans.cpu().numpy(), nuggets.start, older, rows))

    reach = plan.num_keys if plan.reach is None else plan.reach
    keys = rows + nuggets.stop - nuggets.start
    again = replace(plan, spans=split(plan.spans), num_keys=keys, reach=reach, windowed={})
    again = again.with_windows({width: split(cut.spans) for width, cut in plan.windowed.items()})
    # From the host, where the lists of tiles are made.
    return again.to(plan.spans.device)


def _older_moved(spans: NDArray[np.int32], start: int, older: NDArray[np.int64], rows: int) -> NDArray[np.int32]:
    """Spans [B, N, S, 2] with the keys [start, start + older), older [B, N], read at `rows` and on instead."""
    # Where none is older, no span is cut in two.
    begin = np.where(older > 0, start, rows)[..., None]
    end = begin + older[..., None]
    low, high = spans[..., 0], spans[..., 1]
    before = low, np.minimum(high, begin)
    after = np.maximum(low, end), high
    moved = np.maximum(low, begin) - begin + rows, np.minimum(high, end) - begin + rows
    parts = np.stack([np.concatenate(ends, -1) for ends in zip(before, after, moved, strict=True)], -1)
    empty = parts[..., 0] >= parts[..., 1]
    parts[empty] = 0
    last = np.argsort(empty, axis=-1, kind="stable")
    width = max(1, int((~empty).sum(-1).max(initial=0)))
    return np.ascontiguousarray(np.take_along_axis(parts, last[..., None], 2)[:, :, :width], np.int32)
