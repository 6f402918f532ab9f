"""Position encodings for tiny models, and what they do to queries, keys and logits, written out with torch alone."""

from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gistkit.nn import DigitTrie, PositionEncoding, SeqPE, position_encoding
from tests.helpers.models import by_hand


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def encoding(
    name: str, *, heads: int, head_dim: int, layers: int, key_heads: int | None = None, **options: Any
) -> PositionEncoding:
    """One of each name, of weights that show in logits."""
    torch.manual_seed(0)
    axes = 2 if "extra_tokens" in options else 1
    if name.startswith("seqpe"):
        options = {"std": 0.3, "key_heads": key_heads} | options
    if name == "pope":
        options = {"spread": 6.0, "key_heads": key_heads} | options
    encoder = SeqPE(16, digits=4, axes=axes, layers=2, heads=2, std=0.3)
    options = {"length": 200, "grid": (3, 4), "encoder": encoder} | options
    return position_encoding(name, heads=heads, head_dim=head_dim, layers=layers, **options)


def counted(encoder: SeqPE) -> list[int]:
    """The number of positions of each call that encodes some from now on."""
    calls: list[int] = []
    encode = encoder.encode

    def counting(trie: DigitTrie) -> Tensor:
        calls.append(trie.shape.numel())
        return encode(trie)

    encoder.encode = counting  # type: ignore[method-assign]
    return calls


def projected(position: Any, positions: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """SeqPE's e_q [B, H, N, D] and e_k [B, Hk, N, D] at positions [B, N(, axes)]: equation 11, digit by digit."""
    e = position.encoder.plain(positions)
    if position.extra is not None:
        e = torch.cat([position.extra.expand(len(e), -1, -1), e], 1)
    width = position.head_dim
    if position.projection == "none":
        return (e.unflatten(-1, (-1, width)).transpose(1, 2),) * 2
    its = position.projections[layer if position.projection == "layer" else 0]
    parts = [
        e @ its.weight[row : row + width].T + its.bias[row : row + width] for row in range(0, len(its.weight), width)
    ]
    return torch.stack(parts[: position.heads], 1), torch.stack(parts[position.heads :], 1)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, H, N, D] with its pairs (i, i + D/2), as complex numbers, turned by angles [B or 1, H or 1, N, D/2]."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def integrated(
    name: str, position: Any, query: Tensor, key: Tensor, positions: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Queries and keys with positions [B, N(, axes)], and what is added to logits before they are scaled."""
    if name.startswith("rope-2d"):
        extra = position.extra_tokens
        points = torch.cat([positions.new_zeros(len(positions), extra, 2), positions], 1).double()
        half, quarter = query.shape[-1] // 2, query.shape[-1] // 4
        if name == "rope-2d":
            sizes = 100.0 ** (-torch.arange(quarter).double() / quarter)
            angles = torch.cat([points[..., :1] * sizes, points[..., 1:] * sizes], -1)[:, None]
        else:
            its = position.inv_freq[layer].view(-1, 2, 1, half)
            angles = (points.movedim(-1, 0)[:, :, None, :, None] * its.transpose(0, 1)[:, None]).sum(0)
        return turned(query, angles), turned(key, angles), 0.0
    if name.startswith("rope"):
        sizes = float(name.removeprefix("rope-")) ** (-torch.arange(0, query.shape[-1], 2).double() / query.shape[-1])
        angles = (positions[..., None] * sizes)[:, None]
        return turned(query, angles), turned(key, angles), 0.0
    if name == "pope":
        angles = (positions[..., None] * 10000.0 ** (-torch.arange(query.shape[-1]).double() / query.shape[-1]))[
            :, None
        ]
        moved = []
        for x, phases in ((query, 0.0), (key, position.phases[layer])):
            lengths, own = torch.log1p(x.exp()), angles + phases
            moved.append(torch.cat([lengths * own.cos(), lengths * own.sin()], -1))
        return moved[0], moved[1], 0.0
    if name == "alibi":
        heads = query.shape[1]
        # Of four heads, as the paper lists them.
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], dtype=torch.float64)
        distance = (positions[:, None, None, :] - positions[:, None, :, None]).double()
        return query, key, slopes.view(-1, 1, 1) * distance * query.shape[-1] ** 0.5
    if name.startswith("seqpe"):
        e_q, e_k = projected(position, positions, layer)
        if name == "seqpe-sum":
            return query + e_q, key + e_k, 0.0
        if name == "seqpe-mul":
            return query * e_q, key * e_k, 0.0
        return query, key, e_q @ e_k.repeat_interleave(e_q.shape[1] // e_k.shape[1], 1).transpose(2, 3)
    return query, key, 0.0


def waves(points: Tensor, dim: int) -> Tensor:
    """Sines and cosines [.., dim] of numbers [..], channel by channel."""
    frequencies = [10000.0 ** (-2 * (channel // 2) / dim) for channel in range(dim)]
    columns = [(points * f).cos() if channel % 2 else (points * f).sin() for channel, f in enumerate(frequencies)]
    return torch.stack(columns, -1)


def added(name: str, position: Any, positions: Tensor, dim: int) -> Tensor | float:
    """What is added to embedded tokens at positions [B, N(, axes)] within a table."""
    points = positions.double()
    if name == "sinusoidal":
        return waves(points, dim)
    if name == "sinusoidal-2d":
        return torch.cat([waves(points[..., axis], dim // 2) for axis in (0, 1)], -1)
    if name == "learned":
        return position.table[positions]
    if name == "learned-2d":
        return position.table[positions[..., 0], positions[..., 1]]
    return 0.0


def dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, more: Tensor | float, scale: float) -> Tensor:
    """Attention with all logits, of keys that several queries' heads share: [B, N, H, D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    logits = ((query @ key.transpose(2, 3) + more) * scale).masked_fill(~visible, float("-inf"))
    return (logits.softmax(-1) @ value).transpose(1, 2)


def written_out(model: Any, name: str, position: Any, positions: Tensor) -> AbstractContextManager[Any]:
    """The model's own layers on dense attention with the formula of an encoding at positions [B, N(, axes)] in it."""
    layers = count()

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any) -> Any:
        query, key, more = integrated(name, position, query, key, positions, next(layers))
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        # Patches of an image see each other.
        visible = visible.tril() if positions.dim() == 2 else visible
        return dense(query, key, value, visible, more, scaling), None

    return by_hand(model, attention)
