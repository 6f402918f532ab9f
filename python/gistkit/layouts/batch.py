"""Ragged batches: one layout a row, padded to the longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gistkit.layouts._checks import widths
from gistkit.layouts.layout import Layout
from gistkit.layouts.plan import Plan


def compile_batch(
    layouts: Sequence[Layout],
    *,
    window: int | None = None,
    windows: Iterable[int] = (),
    queries: slice | ArrayLike | None = None,
    grouped: bool = True,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan of a batch with one layout a row, padded at the end. A padded row sees nothing and is at position 0.

    Args:
        layouts: B layouts, with the same number of position axes.
        window, windows, queries, grouped, device: as in `Layout.compile`, for every row.

    Returns:
        A Plan with spans [B, Nmax, S, 2], positions and order [B, Nmax], and lengths [B].
    """
    if not layouts:
        raise ValueError("compile_batch: expected at least one layout, got none")
    axes = {layout.positions.shape[:-1] for layout in layouts}
    if len(axes) > 1:
        raise ValueError(f"compile_batch: expected positions with the same number of axes, got {sorted(axes)}")
    parts = [layout.compile_arrays(window, queries, grouped) for layout in layouts]
    lengths = np.array([len(order) for order, *_ in parts])
    batch, rows = len(parts), int(lengths.max())
    positions = np.zeros((*axes.pop(), batch, rows), np.result_type(*(layout.positions.dtype for layout in layouts)))
    # Padding keeps the order a permutation wherever all rows are queries.
    order = np.zeros((batch, rows), np.int64)
    if rows == max(map(len, layouts)):
        order[:] = np.arange(rows)
    for row, (row_order, _, row_positions, _) in enumerate(parts):
        positions[..., row, : len(row_order)] = row_positions
        order[row, : len(row_order)] = row_order
    slices = parts[0][3] if all(part[3] == parts[0][3] for part in parts) else None
    plan = Plan(
        _pad([part[1] for part in parts]),
        max(map(len, layouts)),
        torch.from_numpy(positions),
        torch.from_numpy(order),
        torch.from_numpy(lengths),
        slices,
        reach=max(layout.reach for layout in layouts),
    )
    cuts = {
        asked: _pad([layout.compile_arrays(width, queries, grouped)[1] for layout in layouts])
        for asked, width in widths("compile_batch", windows, window).items()
    }
    return plan.with_windows(cuts).to(device)


def _pad(spans: Sequence[NDArray[np.int32]]) -> torch.Tensor:
    """Spans [Nq, S, 2] of each row as one [B, Nmax, Smax, 2], with empty ones in the padding."""
    rows, width = (max(row.shape[axis] for row in spans) for axis in (0, 1))
    padded = np.zeros((len(spans), rows, width, 2), np.int32)
    for row, its in enumerate(spans):
        padded[row, : its.shape[0], : its.shape[1]] = its
    return torch.from_numpy(padded)
