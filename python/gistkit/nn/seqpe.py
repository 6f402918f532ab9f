"""SeqPE's position encoder: a small transformer reads a position's digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit.layouts.trie import DigitTrie
from gistkit.nn.seqpe_trie import encode


class Block(nn.Module):
    """One layer in the form of GPT-2: norms in front, gelu by tanh, four times as wide within."""

    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.attention_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [P, T, dim], causal over T."""
        count, length, dim = hidden.shape
        query, key, value = (
            x.view(count, length, self.heads, dim // self.heads).transpose(1, 2)
            for x in self.qkv(self.norm_1(hidden)).chunk(3, -1)
        )
        dropped = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        hidden = hidden + self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(count, length, dim)))
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm_2(hidden)), approximate="tanh")))


class SeqPE(nn.Module):
    """Embeddings of positions, read digit by digit (SeqPE, equation 8)."""

    def __init__(
        self,
        dim: int,
        *,
        out_dim: int | None = None,
        base: int = 10,
        digits: int = 5,
        axes: int = 1,
        layers: int = 2,
        heads: int | None = None,
        shared_places: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.digits, self.axes = dim, base, digits, axes
        heads = heads if heads is not None else max(dim // 64, 1)
        self.heads, self.out_dim, self.shared_places = heads, out_dim or dim, shared_places
        self.tokens = nn.Parameter(torch.empty(base, dim))
        self.places = nn.Parameter(torch.empty(digits if shared_places else axes * digits, dim))
        self.dimensions = nn.Parameter(torch.empty(axes, dim)) if axes > 1 else None
        self.cls = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, attention_dropout) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, self.out_dim)
        self.reset_parameters(std)

    @property
    def limit(self) -> int:
        """Positions are below this, on every axis."""
        return int(self.base**self.digits)

    def reset_parameters(self, std: float = 0.02) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.constant_(parameter, float(name.endswith("weight")))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def forward(self, positions: Tensor) -> Tensor:
        """positions [...] (axes = 1) or [..., axes] -> [..., out_dim]."""
        trie = DigitTrie.of(positions, axes=self.axes, base=self.base, digits=self.digits)
        return self.encode(trie)

    def encode(self, trie: DigitTrie) -> Tensor:
        symbols = self._symbols()[trie.symbols]
        out = self.out(self.norm(encode(list(self.blocks), symbols, trie)))
        if trie.inverse is not None:
            out = F.embedding(trie.inverse, out)
        return out.view(*trie.shape, self.out_dim)

    def _symbols(self) -> Tensor:
        """Embeddings [axes x digits x base + 1, dim] of every digit at every place, and of [CLS]."""
        places = self.places.repeat(self.axes, 1) if self.shared_places else self.places
        if self.dimensions is not None:
            places = places + self.dimensions.repeat_interleave(self.digits, 0)
        return torch.cat([(places[:, None] + self.tokens).flatten(0, 1), self.cls[None]])

    def plain(self, positions: Tensor) -> Tensor:
        rows = positions.reshape(-1, self.axes)
        powers = self.base ** torch.arange(self.digits - 1, -1, -1, device=rows.device)
        digits = (rows[..., None] // powers % self.base).flatten(1)
        places = self.places.repeat(self.axes, 1) if self.shared_places else self.places
        hidden = self.tokens[digits] + places
        if self.dimensions is not None:
            hidden = hidden + self.dimensions.repeat_interleave(self.digits, 0)
        hidden = torch.cat([hidden, self.cls.expand(len(rows), 1, -1)], 1)
        for block in self.blocks:
            hidden = block(hidden)
        shape = positions.shape if self.axes == 1 else positions.shape[:-1]
        return self.out(self.norm(hidden[:, -1])).view(*shape, self.out_dim)
