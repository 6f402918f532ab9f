"""Ragged batches: one layout per row, padded to the longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gistkit.common.checks import widths
from gistkit.layouts.layout import Layout
from gistkit.layouts.plan import Plan
from gistkit.layouts.relations import Role


def compile_batch(
    layouts: Sequence[Layout],
    *,
    window: int | None = None,
    windows: Iterable[int] = (),
    queries: slice | ArrayLike | None = None,
    grouped: bool = True,
    aligned: bool = False,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan of a padded batch with one layout per row. Padding sees nothing and has position 0.

    Args:
        layouts: B layouts, with the same number of position axes.
        window, windows, queries, grouped, device: as in `Layout.compile`, for every row.
        aligned: pad after the tokens of each role instead of at the end of rows. Each role then has the same rows in
            the whole batch, and the ragged plan has slices and no lengths. Requires grouped order, all tokens as
            queries, and layouts of one document.

    Returns:
        A Plan with spans [B, Nmax, S, 2], positions and order [B, Nmax], and lengths [B].
    """
    if not layouts:
        raise ValueError("compile_batch: expected at least one layout, got none")
    axes = {layout.positions.shape[:-1] for layout in layouts}
    if len(axes) > 1:
        raise ValueError(f"compile_batch: expected positions with the same number of axes, got {sorted(axes)}")
    if aligned and (queries is not None or not grouped):
        raise ValueError("aligned: expected grouped=True and queries=None with it, got other values")
    parts = [layout.compile_arrays(window, queries, grouped) for layout in layouts]
    slots = [_Slots(layout) for layout in layouts] if aligned else []
    lengths = np.array([len(order) for order, *_ in parts])
    widest = np.max([slot.counts for slot in slots], axis=0) if aligned else lengths.max(keepdims=True)
    bounds = np.concatenate([[0], np.cumsum(widest)])
    batch, rows, tokens = len(parts), int(bounds[-1]), max(map(len, layouts))
    positions = np.zeros((*axes.pop(), batch, rows), np.result_type(*(layout.positions.dtype for layout in layouts)))
    order = np.zeros((batch, rows), np.int64)
    for row, (row_order, _, row_positions, _) in enumerate(parts):
        to = slots[row].rows(bounds) if aligned else np.arange(len(row_order))
        positions[..., row, to] = row_positions
        if rows >= tokens:
            # Padding takes the indices that are left, which keeps the order a permutation wherever all are queries.
            order[row] = len(row_order) + np.cumsum(np.bincount(to, minlength=rows) == 0) - 1
        order[row, to] = row_order
    slices = parts[0][3] if all(part[3] == parts[0][3] for part in parts) else None
    if aligned:
        slices = {r: slice(int(bounds[r]), int(bounds[r + 1])) for r in Role if widest[r]}

    def padded(spans: list[NDArray[np.int32]]) -> torch.Tensor:
        if aligned:
            spans = [slot.moved(part, bounds) for slot, part in zip(slots, spans, strict=True)]
        return _padded_spans(spans)

    plan = Plan(
        padded([part[1] for part in parts]),
        rows if aligned else tokens,
        torch.from_numpy(positions),
        torch.from_numpy(order),
        None if aligned else torch.from_numpy(lengths),
        slices,
        reach=max(layout.reach for layout in layouts),
    )
    cuts = {
        asked: padded([layout.compile_arrays(width, queries, grouped)[1] for layout in layouts])
        for asked, width in widths("compile_batch", windows, window).items()
    }
    return plan.with_windows(cuts).to(device)


class _Slots:
    """Where the roles of one layout lie in its grouped order, and how its rows move when roles begin elsewhere."""

    def __init__(self, layout: Layout) -> None:
        if layout.documents[0] != layout.documents[-1]:
            raise ValueError("aligned: expected layouts of one document, got one of several")
        self.counts = np.bincount(layout.roles, minlength=len(Role))
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])

    def rows(self, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The new row of each of the layout's rows, where role r begins at bounds[r]."""
        return np.arange(self.starts[-1]) + np.repeat(bounds[:-1] - self.starts[:-1], self.counts)

    def moved(self, spans: NDArray[np.int32], bounds: NDArray[np.int64]) -> NDArray[np.int32]:
        """Spans [N, S, 2] of the layout's rows as spans of the new rows: cut where a role ends, moved, joined again."""
        low = np.maximum(spans[:, :, None, 0], self.starts[:-1])
        high = np.minimum(spans[:, :, None, 1], self.starts[1:])
        overlap = low < high
        row, _, role = np.nonzero(overlap)
        shift = (bounds[:-1] - self.starts[:-1])[role]
        low, high = low[overlap] + shift, high[overlap] + shift
        # In this order they ascend in each row: a new one begins where it does not touch the one before.
        new = np.append(True, (row[1:] != row[:-1]) | (low[1:] != high[:-1]))[: len(row)]
        first = np.flatnonzero(new)
        row, low, high = row[first], low[first], high[np.append(first[1:], len(high)) - 1] if len(first) else high
        slot = np.arange(len(row)) - np.searchsorted(row, row)
        moved = np.zeros((int(bounds[-1]), int(slot.max(initial=0)) + 1, 2), np.int32)
        moved[self.rows(bounds)[row], slot] = np.stack([low, high], -1)
        return moved


def _padded_spans(spans: Sequence[NDArray[np.int32]]) -> torch.Tensor:
    """Spans [Nq, S, 2] of each row as one [B, Nmax, Smax, 2], with empty ones in the padding."""
    rows, width = (max(part.shape[axis] for part in spans) for axis in (0, 1))
    padded = np.zeros((len(spans), rows, width, 2), np.int32)
    for row, part in enumerate(spans):
        padded[row, : part.shape[0], : part.shape[1]] = part
    return torch.from_numpy(padded)
