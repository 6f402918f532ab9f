"""Block: a transformer layer on gistkit's attention, with any position encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from gistkit import ops
from gistkit.layouts import Plan
from gistkit.nn.models.cache import KVCache
from gistkit.nn.positions import PositionEncoding

Style = Literal["llama", "gpt2", "vit"]


@dataclass(frozen=True, eq=False)
class Pass:
    """The state that all layers of a forward pass share.

    Args:
        position: the model's encoding.
        prepared: of its `prepare`.
        plan: which tokens see which.
        key_bias: of the encoding, for all keys.
        cache: of the keys of earlier tokens, to which new ones are appended.
    """

    position: PositionEncoding
    prepared: Any
    plan: Plan
    key_bias: Tensor | None = None
    cache: KVCache | None = None


class Attention(nn.Module):
    """Multi-head attention of layer `layer`; `dropout` of its weights, in training."""

    def __init__(self, dim: int, heads: int, layer: int, bias: bool, dropout: float) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"attention_dropout: expected at least 0 and below 1, got {dropout}")
        self.heads, self.layer, self.dropout = heads, layer, dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, hidden: Tensor, shared: Pass) -> Tensor:
        """hidden [B, N, dim]."""
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        scale = query.shape[-1] ** -0.5
        query, key = shared.position(query, key, shared.prepared, self.layer)
        if shared.cache is not None:
            key, value = shared.cache.append(self.layer, key, value)
        tensors, bias = (query, key, value, shared.plan), shared.key_bias
        if self.training and self.dropout:
            mixed = ops.attention_with_dropout(*tensors, dropout=self.dropout, scale=scale, key_bias=bias)
        else:
            mixed = cast(Tensor, ops.attention(*tensors, scale=scale, key_bias=bias))
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return cast(Tensor, self.down(F.silu(gate) * up))


class GELU(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, dim: int, hidden_dim: int, approximate: Literal["none", "tanh"]) -> None:
        super().__init__()
        self.up, self.down, self.approximate = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim), approximate

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x), approximate=self.approximate)))


class Block(nn.Module):
    """A pre-norm layer: attention, then a feed-forward network.

    Args:
        dim: a multiple of `heads`.
        heads: of attention.
        layer: its number in the model, from 0.
        style: "llama" (RMSNorm, SwiGLU, no biases), "gpt2" (LayerNorm, tanh-gelu) or "vit" (LayerNorm, exact gelu).
        hidden_dim: of the feed-forward network; None: 4 dim, and of "llama" 8/3 dim, up to a multiple of 32.
        dropout: of what attention and the network add.
        attention_dropout: of attention's weights; above 0, training uses the dense `ops.attention_with_dropout`.
        drop_path: share of a batch's rows for which attention is skipped in training, and, drawn separately, the
            network; the other rows are scaled by 1 / (1 - drop_path) (stochastic depth, arXiv 1603.09382).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layer: int,
        *,
        style: Style,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path: expected at least 0 and below 1, got {drop_path}")
        if dim % heads:
            raise ValueError(f"dim: expected a multiple of {heads} heads, got {dim}")
        self.norm_1, self.norm_2 = make_norm(style, dim), make_norm(style, dim)
        self.attention = Attention(dim, heads, layer, bias=style != "llama", dropout=attention_dropout)
        if style == "llama":
            self.network: nn.Module = SwiGLU(dim, hidden_dim or -(-8 * dim // 96) * 32)
        else:
            self.network = GELU(dim, hidden_dim or 4 * dim, "tanh" if style == "gpt2" else "none")
        self.dropout, self.drop_path = nn.Dropout(dropout), drop_path

    def forward(self, hidden: Tensor, shared: Pass) -> Tensor:
        """The layer's output [B, N, dim] for hidden states [B, N, dim]."""
        hidden = hidden + self._dropped(self.attention(self.norm_1(hidden), shared))
        return hidden + self._dropped(self.network(self.norm_2(hidden)))

    def _dropped(self, added: Tensor) -> Tensor:
        added = self.dropout(added)
        if not self.training or not self.drop_path:
            return added
        kept = added.new_empty(len(added), 1, 1).bernoulli_(1 - self.drop_path)
        return added * kept / (1 - self.drop_path)


def make_norm(style: Style, dim: int) -> nn.Module:
    """The norm of a style of `Block`."""
    if style not in get_args(Style):
        raise ValueError(f"style: expected {', '.join(get_args(Style))}, got {style!r}")
    return nn.RMSNorm(dim, eps=1e-5) if style == "llama" else nn.LayerNorm(dim, eps=1e-5 if style == "gpt2" else 1e-6)


def check_position(position: PositionEncoding, axes: int, extra_tokens: int, layers: int) -> None:
    """Refuses an encoding whose axes, extra tokens or layers are not the model's."""
    if not isinstance(position, PositionEncoding):
        raise TypeError(f"position: expected a PositionEncoding, got {type(position).__name__}")
    if position.axes not in (None, axes) or position.extra_tokens != extra_tokens:
        raise ValueError(
            f"position: expected one with axes={axes} and extra_tokens={extra_tokens}, got {type(position).__name__} "
            f"with axes={position.axes} and extra_tokens={position.extra_tokens}"
        )
    if position.own_layers not in (None, layers):
        raise ValueError(
            f"position: expected {type(position).__name__} of the model's {layers} layers, got {position.own_layers}"
        )
