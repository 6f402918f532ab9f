"""Plan: a compiled layout for the ops, as tensors: row spans, position IDs and the physical order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gistkit import _gpu
from gistkit.common.checks import at_least, moved
from gistkit.layouts.lists import TileLists, lists_on
from gistkit.layouts.relations import Role


@dataclass(frozen=True, eq=False)
class Plan:
    """The attention mask and position IDs of a layout, ready for `gistkit.attention` and `gistkit.rope`.

    `Layout.compile` makes plans. `from_spans` checks spans that you made yourself; the constructor checks nothing. Do
    not change its tensors in place: tile lists on a GPU, which CUDA graphs hold too, are made only once.

    Args:
        spans: int32 [B or 1, Nq, S, 2]; for each query row S half-open key intervals, ascending and disjoint, empty
            ones (start == end) last.
        num_keys: number of keys Nk the spans refer to; every end is at most Nk.
        positions: int64 or float64 [Nq], [B, Nq] or [A, B, Nq], position IDs in physical order; None if there are none.
        order: int64 [B or 1, Nq], the logical index of each physical row; None if both orders are the same.
        lengths: int64 [B], tokens in each row before its padding; None if no row is padded.
        slices: the rows of each role, if each role has one slice (one document per row, grouped order, the same slices
            in all rows of a batch); otherwise None.
        windowed: {width: plan} of the same rows for layers with a sliding window, whose queries see only keys less than
            `width` before them in logical order; a plan for each of `compile`'s `windows`.
        reach: number of places in logical order of the longest document; a window of that width has no effect. None:
            num_keys.
    """

    spans: Tensor
    num_keys: int
    positions: Tensor | None = None
    order: Tensor | None = None
    lengths: Tensor | None = None
    slices: Mapping[Role, slice] | None = None
    windowed: Mapping[int, Plan] = field(default_factory=dict)
    reach: int | None = None
    # Not an argument, so that `replace` never hands on the lists of other spans.
    _lists: TileLists | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_spans(cls, spans: Tensor, num_keys: int, positions: Tensor | None = None) -> Plan:
        """A plan from your own row spans, which are checked: shape, dtype, range, ascending and disjoint."""
        if not isinstance(spans, Tensor):
            raise TypeError(f"spans: expected a torch tensor, got {type(spans).__name__}")
        num_keys = at_least("from_spans", "num_keys", num_keys, 0)
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
            raise ValueError(
                "spans: expected start <= end in every interval, got an interval that ends before it starts"
            )
        empty = start == end
        follows = empty[..., 1:] | (~empty[..., :-1] & (start[..., 1:] >= end[..., :-1]))
        if not bool(follows.all()):
            raise ValueError("spans: expected ascending, disjoint intervals with empty ones last in every row")
        if positions is not None:
            if positions.dim() not in (1, 2, 3) or positions.shape[-1] != spans.shape[1]:
                raise ValueError(
                    f"positions: expected [Nq], [B, Nq] or [A, B, Nq] with Nq = {spans.shape[1]}, got shape "
                    f"{tuple(positions.shape)}"
                )
            if not bool(positions.isfinite().all()):
                raise ValueError("positions: expected finite values, got NaN or infinity")
        return cls(spans, num_keys, positions)

    def __repr__(self) -> str:
        """Three lines: sizes, the rows of each role, and position IDs."""
        batch, queries, spans, _ = self.spans.shape
        rows = "any batch" if batch == 1 else f"a batch of {batch}"
        windows = f", windows of {', '.join(map(str, self.windowed))}" if self.windowed else ""
        roles = ", ".join(f"{role.name} {rows.start}:{rows.stop}" for role, rows in (self.slices or {}).items())
        order = "logical order" if self.order is None else "physical order"
        positions = "none"
        if self.positions is not None and self.positions.numel():
            values = self.positions
            # Values on a GPU would have to be waited for.
            ends = f"{values.min().item():g}..{values.max().item():g}, " if _gpu.has_values(values) else ""
            positions = f"{ends}{values.dtype}".replace("torch.", "")
        return (
            f"Plan: {queries} queries, {self.num_keys} keys, up to {spans} spans a query, for {rows}{windows}\n"
            f"  rows       {f'{roles}, in ' if roles else ''}{order}\n"
            f"  positions  {positions}, on {self.spans.device}"
        )

    @property
    def num_queries(self) -> int:
        """Number of query rows Nq."""
        return self.spans.shape[1]

    @property
    def inverse(self) -> Tensor | None:
        """int64 [B or 1, N], the physical row of each logical index; None if both orders are the same.

        Raises a ValueError for a plan of only some rows, whose order is not a permutation.
        """
        if self.order is None:
            return None
        if self.num_queries != self.num_keys:
            raise ValueError(f"inverse: expected a plan of all {self.num_keys} rows, got one of {self.num_queries}")
        rows = torch.arange(self.num_queries, device=self.order.device).expand_as(self.order)
        return torch.empty_like(self.order).scatter_(1, self.order, rows)

    def arrange(self, values: Tensor, dim: int = 1) -> Tensor:
        """Values from logical to physical order. `values`: [B, .., N, ..] with N at `dim`, B at 0 if rows differ."""
        return _gather(values, self.order, dim)

    def restore(self, values: Tensor, dim: int = 1) -> Tensor:
        """Values from physical to logical order, the inverse of `arrange`."""
        return _gather(values, self.inverse, dim)

    def rows(self, start: int, stop: int, num_keys: int | None = None) -> Plan:
        """The plan of the physical rows [start, stop), such as the next ones of step-by-step decoding.

        Args:
            start: first row, at least 0.
            stop: end of the rows, at most the number of rows.
            num_keys: number of available keys; None: all of the plan's. A ValueError if a row sees further keys (not
                checked on a GPU, where such keys are ignored).
        """
        if not 0 <= start <= stop <= self.num_queries:
            raise ValueError(f"rows: expected 0 <= start <= stop <= {self.num_queries}, got start {start}, stop {stop}")
        spans = self.spans[:, start:stop]
        keys = self.num_keys if num_keys is None else int(num_keys)
        if keys != self.num_keys and spans.numel() and _gpu.has_values(spans) and int(spans.max()) > keys:
            raise ValueError(
                f"rows: expected rows that see only {keys} keys, got one that sees key {int(spans.max()) - 1}"
            )
        slices = None
        if self.slices is not None:
            cut = {r: slice(max(s.start, start) - start, min(s.stop, stop) - start) for r, s in self.slices.items()}
            slices = {role: rows for role, rows in cut.items() if rows.start < rows.stop}
        plan = Plan(
            spans.contiguous(),
            keys,
            None if self.positions is None else self.positions[..., start:stop],
            None if self.order is None else self.order[:, start:stop],
            None if self.lengths is None else (self.lengths - start).clamp(0, stop - start),
            slices,
            reach=self.reach,
        )
        return plan.with_windows({width: cut.spans[:, start:stop] for width, cut in self.windowed.items()})

    def to(self, device: torch.device | str) -> Plan:
        """The same plan with its tensors on `device`. On a GPU it also gets attention's lists of visible tiles."""
        move = lambda t: None if t is None else moved(t, device)  # noqa: E731
        plan = replace(
            self,
            spans=moved(self.spans, device),
            positions=move(self.positions),
            order=move(self.order),
            lengths=move(self.lengths),
        )
        plan = plan.with_windows({width: moved(cut.spans, device) for width, cut in self.windowed.items()})
        for source, target in ((self, plan), *((cut, plan.windowed[width]) for width, cut in self.windowed.items())):
            if target.spans is source.spans:
                target._keep(source._lists)
            elif source.spans.is_cpu and _gpu.on_gpu(target.spans):
                target._keep(lists_on(source.spans, target.num_keys, target.spans))
        return plan

    def _keep(self, lists: TileLists | None) -> None:
        """Keeps lists of this plan's spans for the next call of attention."""
        object.__setattr__(self, "_lists", lists)

    def with_windows(self, spans: Mapping[int, Tensor]) -> Plan:
        """The same plan with `windowed` from {width: spans}: this plan's spans, cut by each sliding window."""
        plan = replace(self, windowed={}) if self.windowed else self
        if not spans:
            return plan
        windowed = {width: replace(plan, spans=cut.contiguous()) for width, cut in spans.items()}
        return replace(plan, windowed=windowed)


def _gather(values: Tensor, index: Tensor | None, dim: int) -> Tensor:
    if index is None:
        return values
    if index.shape[0] == 1:
        return values.index_select(dim, index[0])
    shape = [1] * values.dim()
    shape[0], shape[dim] = index.shape
    return values.take_along_dim(index.view(shape), dim)
