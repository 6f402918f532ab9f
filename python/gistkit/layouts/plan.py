"""Plan: what a compiled layout gives the ops. Row spans, position ids and the physical order, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """Which keys each query row sees and at which positions, ready for `gistkit.attention` and `gistkit.rope`.

    Args:
        spans: int32 [B or 1, Nq, S, 2]; for each query row S half-open key intervals, ascending and disjoint, empty
            ones (start == end) last.
        num_keys: number of keys Nk the spans refer to; every end is at most Nk.
        positions: position ids in physical order, [Nq], [B, Nq] or [A, B, Nq]; None if the plan carries none.
        order: int64 [B or 1, Nq], the logical index of each physical row; None where the two orders are the same.
    """

    spans: Tensor
    num_keys: int
    positions: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def from_spans(cls, spans: Tensor, num_keys: int, positions: Tensor | None = None) -> Plan:
        """A plan from row spans that the caller made. Checks them: shape, dtype, range, ascending and disjoint."""
        if spans.dim() not in (3, 4) or spans.shape[-1] != 2:
            raise ValueError(f"spans: expected [B or 1, Nq, S, 2] or [Nq, S, 2], got shape {tuple(spans.shape)}")
        if spans.dtype != torch.int32:
            raise TypeError(f"spans: expected dtype torch.int32, got {spans.dtype}")
        spans = (spans if spans.dim() == 4 else spans[None]).contiguous()
        start, end = spans.unbind(-1)
        if bool((start < 0).any()) or bool((end > num_keys).any()):
            low, high = int(spans.min()), int(spans.max())
            raise ValueError(f"spans: expected intervals within [0, {num_keys}], got values from {low} to {high}")
        if bool((start > end).any()):
            raise ValueError("spans: expected start <= end in every interval, got an interval that ends before it starts")
        empty = start == end
        follows = empty[..., 1:] | (~empty[..., :-1] & (start[..., 1:] >= end[..., :-1]))
        if not bool(follows.all()):
            raise ValueError("spans: expected ascending, disjoint intervals with empty ones last in every row")
        return cls(spans, int(num_keys), positions)

    @property
    def num_queries(self) -> int:
        """Number of query rows Nq."""
        return self.spans.shape[1]

    def to(self, device: torch.device | str) -> Plan:
        """The same plan with its tensors on `device`."""
        move = lambda t: None if t is None else t.to(device)  # noqa: E731
        return Plan(self.spans.to(device), self.num_keys, move(self.positions), move(self.order))
