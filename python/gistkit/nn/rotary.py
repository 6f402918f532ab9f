"""Rotary position encodings: RoPE, its two forms for images, and PoPE."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit import ops
from gistkit.nn.positions import PositionEncoding, rows_of
from gistkit.ops.attention import MAX_HEAD_DIM

Rotation = tuple[Tensor, Tensor]


class Rotary(PositionEncoding):
    """Rotates queries and keys by position times `frequencies`; tokens without a position are not rotated."""

    axes: int
    head_dim: int

    def prepare(self, positions: Tensor, embeddings: Tensor | None = None) -> Rotation:
        """(positions [axes, B or 1, extra + N], frequencies) as `gistkit.rope` takes them."""
        super().prepare(positions, embeddings)
        frequencies = self.frequencies()
        points = rows_of(positions, self.axes).movedim(-1, 0)
        # At 0 a rotation is none.
        return F.pad(points, (self.extra_tokens, 0)).to(frequencies.device), frequencies

    def frequencies(self) -> Tensor:
        """Angles per unit of position, in a form of `gistkit.rope`'s inv_freq."""
        raise NotImplementedError

    def layer_frequencies(self, frequencies: Tensor, layer: int) -> Tensor:
        """Those of one layer."""
        return frequencies

    def forward(self, query: Tensor, key: Tensor, prepared: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        positions, frequencies = prepared
        for name, given in (("query", query), ("key", key)):
            if given.shape[-1] != self.head_dim:
                raise ValueError(
                    f"{name}: expected [B, H, N, {self.head_dim}], as head_dim of {type(self).__name__} says, got "
                    f"shape {tuple(given.shape)}"
                )
        return ops.rope(query, key, positions, self.layer_frequencies(frequencies, layer))


class RoPE(Rotary):
    """Rotary position embedding (RoFormer, arXiv 2104.09864, equation 34); channel i is paired with i + D/2.

    Args:
        head_dim: D, even.
        base: of the wavelengths; larger for longer texts.
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0, extra_tokens: int = 0) -> None:
        super().__init__(1, extra_tokens)
        _check(head_dim, 2, base)
        self.head_dim, self.base = head_dim, float(base)
        # Whole numbers follow the model to its device, and not to a dtype that would round frequencies.
        self.register_buffer("channels", torch.arange(0, head_dim, 2), persistent=False)

    channels: Tensor

    def frequencies(self) -> Tensor:
        """[1, D/2]."""
        return (self.base ** (-self.channels.double() / (2 * len(self.channels))))[None]


class PoPE(RoPE):
    """Polar coordinates: a channel's content is its length, its position an angle (Gopalakrishnan et al., 2509.10534).

    A query at t and a key at s give the logit sum_c softplus(q_c) softplus(k_c) cos((s - t) base**(-c / D) + phase_c).
    Queries and keys become twice as wide; the scale of attention stays that of D.

    Args:
        heads: of queries.
        head_dim: D, at most 128.
        layers: layers of the model, each with its own phases [Hk, D], which are learned. Beyond [-2 pi, 0] a phase
            counts as the nearer end, and its gradient, which is that of this end, can lead it back.
        key_heads: Hk, heads of keys, where queries share them; None: heads.
        base: of the wavelengths.
        spread: phases begin evenly distributed in [-spread, 0], 0 .. 2 pi; at 0 texts may be longer than in training.
        extra_tokens: see `PositionEncoding`; they are not rotated.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        layers: int,
        *,
        key_heads: int | None = None,
        base: float = 10000.0,
        spread: float = 0.0,
        extra_tokens: int = 0,
    ) -> None:
        super().__init__(2 * head_dim, base=base, extra_tokens=extra_tokens)
        if not 0 <= spread <= 2 * math.pi:
            raise ValueError(f"spread: expected 0 to 2 pi, got {spread}")
        check_doubled(head_dim)
        key_heads = heads if key_heads is None else key_heads
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads: expected a divisor of {heads} heads, got {key_heads}")
        self.heads, self.head_dim, self.layers, self.spread = heads, head_dim, layers, spread
        self.key_heads, self.own_layers = key_heads, layers
        self.phases = nn.Parameter(torch.empty(layers, key_heads, 1, head_dim).uniform_(-spread, 0))

    def forward(self, query: Tensor, key: Tensor, prepared: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        for name, given, heads in (("query", query, self.heads), ("key", key, self.key_heads)):
            if (given.shape[1], given.shape[3]) != (heads, self.head_dim):
                size = f"[B, {heads}, {given.shape[2]}, {self.head_dim}]"
                raise ValueError(f"{name}: expected {size}, got shape {tuple(given.shape)}")
        phases = self.phases[layer]
        phases = phases + (phases.clamp(-2 * math.pi, 0) - phases).detach()
        # Sines and cosines of rounded phases would be far off.
        phases = phases.to(torch.promote_types(key.dtype, torch.float32))
        lengths = F.softplus(key.to(phases.dtype))
        turned = torch.cat([lengths * phases.cos(), lengths * phases.sin()], -1).to(key.dtype)
        return ops.rope(F.pad(F.softplus(query).to(query.dtype), (0, self.head_dim)), turned, *prepared)


class RoPE2D(Rotary):
    """Axial RoPE: half of the pairs turn with the row, the other half with the column (arXiv 2403.13298, eq. 10).

    Args:
        head_dim: D, a multiple of 4.
        base: of the wavelengths.
        extra_tokens: see `PositionEncoding`; they are not rotated.
    """

    def __init__(self, head_dim: int, *, base: float = 100.0, extra_tokens: int = 0) -> None:
        super().__init__(2, extra_tokens)
        _check(head_dim, 4, base)
        self.head_dim, self.base = head_dim, float(base)
        self.register_buffer("channels", torch.arange(0, head_dim // 2, 2), persistent=False)

    channels: Tensor

    def frequencies(self) -> Tensor:
        """[2, D/2], zero where an axis does not rotate a pair."""
        return torch.block_diag(*[self.base ** (-self.channels.double() / (self.head_dim // 2))] * 2)


class RoPE2DMix(Rotary):
    """RoPE-Mixed: all pairs turn with row and column, by frequencies learned for each head (arXiv 2403.13298, eq. 14).

    They are initialised in random directions; those of a head's second half are orthogonal to its first.

    Args:
        heads: H.
        head_dim: D, a multiple of 4.
        layers: layers of the model, each with its own frequencies.
        base: of the wavelengths at the start.
        extra_tokens: see `PositionEncoding`; they are not rotated.
    """

    def __init__(self, heads: int, head_dim: int, layers: int, *, base: float = 10.0, extra_tokens: int = 0) -> None:
        super().__init__(2, extra_tokens)
        _check(head_dim, 4, base)
        self.heads, self.head_dim, self.layers, self.base = heads, head_dim, layers, float(base)
        self.own_layers = layers
        sizes = base ** (-torch.arange(0, head_dim, 4) / head_dim)
        directions = 2 * math.pi * torch.rand(layers, heads, 1)
        turned = torch.cat([directions.expand(-1, -1, len(sizes)), directions + math.pi / 2 + 0 * sizes], -1)
        along = sizes.repeat(2)
        self.inv_freq = nn.Parameter(torch.stack([along * turned.cos(), along * turned.sin()], 2))

    def frequencies(self) -> Tensor:
        """[layers, H, 2, D/2]."""
        return self.inv_freq

    def layer_frequencies(self, frequencies: Tensor, layer: int) -> Tensor:
        return frequencies[layer]


def check_doubled(head_dim: int) -> None:
    """Refuses heads that are too wide for attention once queries and keys are twice as wide."""
    if not 1 <= head_dim <= MAX_HEAD_DIM // 2:
        raise ValueError(
            f"head_dim: expected 1 to {MAX_HEAD_DIM // 2}, as queries and keys become twice as wide and attention "
            f"takes {MAX_HEAD_DIM}, got {head_dim}"
        )


def _check(head_dim: int, multiple: int, base: float) -> None:
    if head_dim < 1 or head_dim % multiple:
        raise ValueError(f"head_dim: expected a multiple of {multiple}, got {head_dim}")
    if not base > 1:
        raise ValueError(f"base: expected above 1, got {base}")
