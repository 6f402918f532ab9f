"""RoleLinear: a linear map, or a norm, with separate parameters for the tokens of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit.nn.adapted import Factors, adapted_linear, fits, transformed


class LowRank(nn.Module):
    """What a LoRA adapter adds to a linear map: up(down(dropout(x))) times a scale (LoRA, arXiv 2106.09685, eq. 3).

    Args:
        down: [in -> rank], without bias.
        up: [rank -> out], without bias.
        scale: alpha / rank.
        dropout: before `down`; None: none.
    """

    def __init__(self, down: nn.Module, up: nn.Module, scale: float = 1.0, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.down, self.up, self.scale = down, up, scale
        self.dropout = nn.Identity() if dropout is None else dropout

    @classmethod
    def new(cls, base: nn.Linear, rank: int, scale: float = 1.0) -> LowRank:
        """An adapter of `base` that changes nothing yet: `up` is zero."""
        down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        nn.init.zeros_(up.weight)
        return cls(down, up, scale)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the map's output at x [.., in]; [.., out] in x's dtype."""
        weight = getattr(self.down, "weight", x)
        return (self.up(self.down(self.dropout(x).to(weight.dtype))) * self.scale).to(x.dtype)


class TokenMap(nn.Module):
    """An embedding as a map of token ids [.., N, 1], so that roles may have adapters of it in a `RoleLinear`."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings [.., N, d] of token ids x [.., N, 1]."""
        return self.embedding(x[..., 0])  # type: ignore[no-any-return]


class LowRankTokens(LowRank):
    """What a LoRA adapter adds to an embedding, at token ids [.., N, 1].

    Args:
        down: {name: [rank, V]}; up: {name: [d, rank]}: where parameter `name` is found, also after a move.
        scale: alpha / rank, times the embedding's own factor.
    """

    def __init__(self, down: nn.ParameterDict, up: nn.ParameterDict, name: str, scale: float) -> None:
        super().__init__(down, up, scale)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the embeddings of x [.., N, 1]; [.., N, d]."""
        down, up = (cast(Any, table)[self.name] for table in (self.down, self.up))
        return F.linear(F.embedding(x[..., 0], down.T), up) * self.scale


class RoleLinear(nn.Module):
    """A linear map or norm in which each role may have an adapter, or a whole map, of its own (GistPool, Section 5.2).

    In the grouped order of a plan the tokens of a role are one slice, so its parameters are applied only to that slice,
    without a mask or a second pass over all tokens. Rows in no slice pass through the base map.

    Args:
        base: the map of every token that no role's own map takes.
        roles: {name: LowRank, added to the base's output, or a whole map or norm, in the base's place}.
    """

    def __init__(self, base: nn.Module, roles: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.base = base
        self.roles = nn.ModuleDict(roles)

    def forward(self, x: Tensor, slices: Mapping[str, slice]) -> Tensor:
        """The map of x [.., N, in], as [.., N, out].

        Args:
            slices: {name: rows of x}, not overlapping; a plan's `slices` under the names given to `roles`.

        Raises:
            ValueError: if a slice names no role, leaves [0, N), or overlaps another.
        """
        parts = _ordered(slices, x.shape[-2], self.roles)
        if any(not isinstance(self.roles[name], LowRank) for name, _ in parts):
            return self._joined(x, parts)
        if parts and all(self._fits(x, name) for name, _ in parts):
            return self._adapted(x, parts)
        out = self.base(x)
        if out is x and parts:
            out = x.clone()
        for name, rows in parts:
            out = _add_rows(out, self.roles[name](x[..., rows, :]), rows)
        return out

    def all_rows(self, x: Tensor, role: str) -> Tensor:
        """The map of x [.., in], all of one role, as [.., out]; the base map if the role has no parameters."""
        if role not in self.roles:
            return self.base(x)  # type: ignore[no-any-return]
        role_map = self.roles[role]
        if not isinstance(role_map, LowRank):
            return role_map(x)  # type: ignore[no-any-return]
        if self._fits(x, role):
            return self._adapted(x, [(role, slice(0, x.shape[-2]))])
        return self._beside(x, role_map)

    def of_rows(self, x: Tensor, roles: Sequence[str]) -> Tensor:
        """The map of x [B, N, in] in which each row of the batch is of one role, as in decoding token by token.

        Args:
            roles: the role of each row; rows of a role without parameters pass through the base. A ValueError if there
                are not B.
        """
        if len(roles) != x.shape[0]:
            raise ValueError(f"roles: expected {x.shape[0]}, one for each row, got {len(roles)}")
        distinct = sorted(set(roles))
        slices = {role: {role: slice(0, x.shape[-2])} if role in self.roles else {} for role in distinct}
        if len(distinct) <= 1:
            return self(x, slices[distinct[0]] if distinct else {})  # type: ignore[no-any-return]
        rows, order = _rows_by_role(tuple(roles), str(x.device))
        parts = [self(x[index], slices[role]) for role, index in zip(distinct, rows, strict=True)]
        return torch.cat(parts)[order]

    def _fits(self, x: Tensor, role: str) -> bool:
        adapter: Any = self.roles[role]
        return fits(x, self.base, adapter.down, adapter.up, adapter.dropout)

    def _adapted(self, x: Tensor, parts: Sequence[tuple[str, slice]]) -> Tensor:
        """All maps as one function of x, whose gradient is made once."""
        roles = cast(dict[str, Any], self.roles)
        adapters = [
            Factors(roles[name].down.weight, roles[name].up.weight, roles[name].scale, rows.start, rows.stop)
            for name, rows in parts
        ]
        return adapted_linear(x, cast(nn.Linear, self.base), adapters)

    def _beside(self, x: Tensor, adapter: nn.Module) -> Tensor:
        out: Tensor = self.base(x)
        # Under autocast the two may have different dtypes.
        return (out + adapter(x)).to(out.dtype)

    def _joined(self, x: Tensor, parts: list[tuple[str, slice]]) -> Tensor:
        """Each row through one map: those of a role that has a whole one do not pass through the base."""
        pieces, at = [], 0
        for name, rows in [*parts, (None, slice(x.shape[-2], None))]:
            if rows.start > at:
                pieces.append(self.base(x[..., at : rows.start, :]))
            if name is not None:
                part, role_map = x[..., rows, :], self.roles[name]
                pieces.append(self._beside(part, role_map) if isinstance(role_map, LowRank) else role_map(part))
                at = rows.stop
        return torch.cat(pieces, -2)


@lru_cache(maxsize=16)
def _rows_by_role(roles: tuple[str, ...], device: str) -> tuple[list[Tensor], Tensor]:
    """The rows of each role, by its name, and where each row then is; the same for all maps of a pass."""
    rows = [[row for row, name in enumerate(roles) if name == role] for role in sorted(set(roles))]
    # They outlive the call: made in inference mode, they could not serve training later.
    with torch.inference_mode(False):
        order = torch.tensor([row for part in rows for row in part]).argsort()
        return [torch.tensor(part, device=device) for part in rows], order.to(device)


def _ordered(slices: Mapping[str, slice], rows: int, roles: nn.ModuleDict) -> list[tuple[str, slice]]:
    bounds = {
        name: slice(part.start or 0, rows if part.stop is None else part.stop, part.step)
        for name, part in slices.items()
    }
    filled = ((name, part) for name, part in bounds.items() if part.start < part.stop)
    parts = sorted(filled, key=lambda named: named[1].start)
    at = 0
    for name, part in parts:
        if name not in roles:
            raise ValueError(f"slices: expected roles among {', '.join(roles)}, got {name}")
        if part.start < at or part.stop > rows or part.step not in (None, 1):
            raise ValueError(f"slices: expected disjoint slices within [0, {rows}), got {dict(slices)}")
        at = part.stop
    return parts


class _AddRows(torch.autograd.Function):
    """Adds to some rows in place; unlike autograd's own slices it copies no gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, added: Tensor, start: int, stop: int) -> Tensor:  # type: ignore[override]
        ctx.rows = start, stop
        ctx.mark_dirty(out)
        out[..., start:stop, :] += added
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        start, stop = ctx.rows
        return grad, grad[..., start:stop, :], None, None


def _add_rows(out: Tensor, added: Tensor, rows: slice) -> Tensor:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        out[..., rows, :] += added
        return out
    if transformed():
        return out + F.pad(added, (0, 0, rows.start, out.shape[-2] - rows.stop)).to(out.dtype)
    return _AddRows.apply(out, added, rows.start, rows.stop)  # type: ignore[no-any-return]
