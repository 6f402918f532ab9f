"""Ragged batches: one layout a row, padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike

from gistkit.layouts.layout import Layout
from gistkit.layouts.plan import Plan


def compile_batch(
    layouts: Sequence[Layout],
    *,
    window: int | None = None,
    queries: slice | ArrayLike | None = None,
    grouped: bool = True,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan of a batch with one layout a row, padded at the end. A padded row sees nothing and is at position 0.

    Args:
        layouts: B layouts, with the same number of position axes.
        window, queries, grouped, device: as in `Layout.compile`, for every row.

    Returns:
        A Plan with spans [B, Nmax, S, 2], positions and order [B, Nmax], and lengths [B].
    """
    if not layouts:
        raise ValueError("compile_batch: expected at least one layout, got none")
    axes = {layout.positions.shape[:-1] for layout in layouts}
    if len(axes) > 1:
        raise ValueError(f"compile_batch: expected positions with the same number of axes, got {sorted(axes)}")
    plans = [layout.compile(window=window, queries=queries, grouped=grouped) for layout in layouts]
    lengths = torch.tensor([plan.num_queries for plan in plans])
    batch, rows, num_keys = len(plans), int(lengths.max()), max(plan.num_keys for plan in plans)
    spans = torch.zeros(batch, rows, max(plan.spans.shape[2] for plan in plans), 2, dtype=torch.int32)
    floating = any(layout.positions.dtype.kind == "f" for layout in layouts)
    positions = torch.zeros(*axes.pop(), batch, rows, dtype=torch.float64 if floating else torch.int64)
    # Padding keeps the order a permutation, except where only some rows are queries.
    order = torch.arange(rows).repeat(batch, 1) if queries is None else torch.zeros(batch, rows, dtype=torch.int64)
    for row, plan in enumerate(plans):
        count, width = plan.spans.shape[1:3]
        spans[row, :count, :width] = plan.spans[0]
        positions[..., row, :count] = plan.positions if plan.positions.dim() == 1 else plan.positions[:, 0]
        order[row, :count] = plan.order[0]
    slices = plans[0].slices if all(plan.slices == plans[0].slices for plan in plans) else None
    return Plan(spans, num_keys, positions, order, lengths, slices).to(device)
