"""Position encodings that are added to the embedded tokens: sinusoidal and learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit.nn.positions import PositionEncoding, rows_of


class Sinusoidal(PositionEncoding):
    """Sines and cosines of the position (Attention Is All You Need, arXiv 1706.03762, section 3.5).

    Channels 2i and 2i + 1 are the sine and cosine of position * base ** (-2i / width); with several axes each has
    width = dim / axes channels, the first axis first. Tokens without a position are left unchanged.

    Args:
        dim: channels, a multiple of 2 * axes.
        base: of the wavelengths.
        scale: factor of what is added, for embeddings much smaller than 1.
        axes, extra_tokens: see `PositionEncoding`.
    """

    axes: int

    def __init__(
        self, dim: int, *, base: float = 10000.0, scale: float = 1.0, axes: int = 1, extra_tokens: int = 0
    ) -> None:
        super().__init__(axes, extra_tokens)
        if dim < 1 or dim % (2 * axes):
            raise ValueError(f"dim: expected a multiple of {2 * axes} for {axes} axes, got {dim}")
        self.dim, self.base, self.scale = dim, float(base), scale

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        points = rows_of(positions, self.axes).to(hidden.device, torch.float64)
        width = self.dim // self.axes
        frequencies = self.base ** (-torch.arange(0, width, 2, device=hidden.device, dtype=torch.float64) / width)
        angles = points[..., None] * frequencies
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-3) * self.scale
        return _add(hidden, waves, self.extra_tokens)


class Learned(PositionEncoding):
    """A learned embedding of each position, interpolated beyond the table's range.

    If a row has positions beyond the table, the table is stretched over 0 .. its highest position (align_corners: first
    on first, last on last); `extent` fixes the length instead. A token's embedding then depends on the highest position
    of its row, so a cache works only within the table, or with an extent.

    Args:
        length: positions of the table.
        dim: channels.
        extent: the length that the table is stretched (or shrunk) to; positions are below it. It may be set later.
        std: of the normal distribution that the table starts from.
        extra_tokens: see `PositionEncoding`; each has an embedding of its own.

    Paper: SeqPE, section 4.1 (APE-Learn).
    """

    def __init__(
        self, length: int, dim: int, *, extent: int | None = None, std: float = 0.02, extra_tokens: int = 0
    ) -> None:
        super().__init__(1, extra_tokens)
        if length < 1:
            raise ValueError(f"length: expected at least 1, got {length}")
        self.length, self.dim, self.extent = length, dim, extent
        self.table = nn.Parameter(torch.empty(length, dim))
        self.extra = nn.Parameter(torch.empty(extra_tokens, dim)) if extra_tokens else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        points = rows_of(positions, 1)
        extent = _extent(points, (self.length,), None if self.extent is None else (self.extent,))
        points, extent = points.to(hidden.device, torch.float64)[..., 0], extent.to(hidden.device)[..., 0]
        # Within the table the factor is exactly 1, and a place exactly a row.
        places = points * (self.length - 1) / (extent - 1).clamp(min=1)
        low = places.floor()
        part = (places - low).to(self.table.dtype)[..., None]
        below = F.embedding(low.long(), self.table)
        above = F.embedding((low.long() + 1).clamp(max=self.length - 1), self.table)
        return _add(hidden, torch.lerp(below, above, part), self.extra_tokens, self.extra)

    def check_cached(self, positions: Tensor) -> None:
        if self.extent is None and bool((positions >= self.length).any()):
            raise ValueError(
                f"positions: expected below the table's length of {self.length} with a cache, or `extent` set to the "
                f"length that it is stretched to, got {positions.max().item()}"
            )


class Learned2D(PositionEncoding):
    """A learned embedding of each cell of a grid, interpolated (bicubic) beyond its range.

    If positions lie beyond the grid, it is stretched over 0 .. the highest, each axis separately, as images are resized
    (align_corners=False); `extent` fixes the size instead.

    Args:
        grid: (rows, columns) of the table.
        dim: channels.
        extent: (rows, columns) that the grid is resized to; positions are below it. It may be set later.
        std: of the normal distribution that the table starts from.
        extra_tokens: see `PositionEncoding`; each has an embedding of its own.

    Paper: SeqPE, section 4.3 (APE-Learn).
    """

    def __init__(
        self,
        grid: tuple[int, int],
        dim: int,
        *,
        extent: tuple[int, int] | None = None,
        std: float = 0.02,
        extra_tokens: int = 0,
    ) -> None:
        super().__init__(2, extra_tokens)
        if len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"grid: expected (rows, columns) of at least 1, got {grid}")
        self.grid, self.dim, self.extent = tuple(grid), dim, extent
        self.table = nn.Parameter(torch.empty(*grid, dim))
        self.extra = nn.Parameter(torch.empty(extra_tokens, dim)) if extra_tokens else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        points = rows_of(positions, 2)
        extent = _extent(points, self.grid, self.extent).to(hidden.device)
        points = points.to(hidden.device, torch.float64)
        down, across = (_bicubic(points[..., i], size, extent[..., i]) for i, size in enumerate(self.grid))
        weights = (down[..., :, None] * across[..., None, :]).flatten(-2).to(self.table.dtype)
        return _add(hidden, weights @ self.table.flatten(0, 1), self.extra_tokens, self.extra)


def _extent(points: Tensor, sizes: Sequence[int], fixed: Sequence[int] | None) -> Tensor:
    """float64 [B, 1, axes]: the size that the table is stretched to in each row. `points`: [B, N, axes]."""
    # Position 0 is in every table; without positions, it is the highest.
    points = F.pad(points, (0, 0, 1, 0))
    if fixed is None:
        highest = points.amax(1, keepdim=True).double() + 1
        return torch.maximum(highest, highest.new_tensor(sizes))
    if points.device.type == "cpu" and not torch.compiler.is_compiling():
        last = points.flatten(0, 1).amax(0)
        if bool((last >= last.new_tensor(fixed)).any()):
            raise ValueError(f"positions: expected below the extent {tuple(fixed)}, got {tuple(last.tolist())}")
    return torch.tensor(fixed, dtype=torch.float64).expand(points.shape[0], 1, len(sizes))


def _bicubic(points: Tensor, size: int, extent: Tensor) -> Tensor:
    """Weights [B, N, size] of a table's rows at points [B, N] of its resized form (cubic convolution, a = -0.75)."""
    places = (points + 0.5) * size / extent - 0.5
    low = places.floor()
    part = places - low
    weights = torch.stack([_cubic(part + 1), _cubic(part), _cubic(1 - part), _cubic(2 - part)], -1)
    rows = (low[..., None] + torch.arange(-1, 3, device=points.device)).clamp(0, size - 1).long()
    return weights.new_zeros(*points.shape, size).scatter_add(-1, rows, weights)


def _cubic(distance: Tensor) -> Tensor:
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, far)


def _add(hidden: Tensor, rows: Tensor, extra_tokens: int, extra: Tensor | None = None) -> Tensor:
    if hidden.shape[1] != extra_tokens + rows.shape[1]:
        raise ValueError(
            f"positions: expected one for each of {hidden.shape[1] - extra_tokens} tokens, got {rows.shape[1]}"
        )
    if hidden.shape[-1] != rows.shape[-1]:
        raise ValueError(f"dim: expected that of the hidden states, {hidden.shape[-1]}, got {rows.shape[-1]}")
    if rows.shape[0] not in (1, hidden.shape[0]):
        raise ValueError(f"positions: expected 1 or {hidden.shape[0]} rows, got {rows.shape[0]}")
    if extra_tokens:
        extra = rows.new_zeros(extra_tokens, rows.shape[-1]) if extra is None else extra
        rows = torch.cat([extra.expand(rows.shape[0], -1, -1), rows], 1)
    return hidden + rows.to(hidden.dtype)
