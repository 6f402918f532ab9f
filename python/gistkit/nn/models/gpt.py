"""GPT: a causal language model whose position encoding is an argument."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from gistkit.layouts import Plan, causal_plan
from gistkit.nn.models.block import Block, Pass, Style, check_position, make_norm
from gistkit.nn.models.cache import KVCache
from gistkit.nn.positions import PositionEncoding


class GPT(nn.Module):
    """A decoder-only language model on gistkit's attention, whose output embedding is the input embedding.

    Args:
        vocab_size: tokens.
        dim: width, a multiple of `heads`.
        layers: number of layers.
        heads: of attention.
        position: the position encoding, with 1 axis; its parameters are not initialised again.
        hidden_dim: of the feed-forward networks; see `Block`.
        dropout: of embeddings, and of what attention and feed-forward networks add.
        attention_dropout: of attention's weights; see `Block`.
        style: of the layers; see `Block`.
        std: standard deviation of the initial weights.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        position: PositionEncoding,
        *,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        style: Style = "llama",
        std: float = 0.02,
    ) -> None:
        super().__init__()
        check_position(position, axes=1, extra_tokens=0, layers=layers)
        self.tokens = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                dim, heads, layer, style=style, hidden_dim=hidden_dim, dropout=dropout,
                attention_dropout=attention_dropout,
            )
            for layer in range(layers)
        )  # fmt: skip
        self.norm = make_norm(style, dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self._reset_parameters(layers, std)
        self.position = position

    def _reset_parameters(self, layers: int, std: float) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the hidden states 2 * layers times.
                added = name.endswith(("attention.out.weight", "network.down.weight"))
                nn.init.normal_(parameter, std=std / math.sqrt(2 * layers) if added else std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        cache: KVCache | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Logits [B, N, vocab_size]; arguments as in `hidden`."""
        hidden = self.hidden(input_ids, positions, embeddings=embeddings, cache=cache, plan=plan)
        return cast(Tensor, self.head(hidden))

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        cache: KVCache | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Hidden states [B, N, dim] after the last norm.

        Args:
            input_ids: int64 [B, N]; with a cache, the tokens after the cached ones.
            positions: [N] or [B, N]; None: 0 .. N-1, with a cache those after each row's last.
            embeddings: [N, out_dim] or [B, N, out_dim], SeqPE's outputs at `positions`, if already computed.
            cache: to which the keys of these tokens are appended.
            plan: which tokens see which, for N queries and all keys; None: causal.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected [B, N], got shape {tuple(input_ids.shape)}")
        count, held = input_ids.shape[1], 0 if cache is None else len(cache)
        device = input_ids.device
        positions = self._positions(input_ids, positions, cache)
        if cache is not None:
            cache.check_batch(input_ids.shape[0])
            self.position.check_cached(positions)
        hidden = self.dropout(self.position.embed(self.tokens(input_ids), positions))
        prepared = self.position.prepare(positions, embeddings)
        seen = positions if cache is None else cache.followed_by(positions)
        key_bias = self.position.key_bias(seen, torch.promote_types(hidden.dtype, torch.float32))
        plan = causal_plan(count, held + count, device) if plan is None else plan
        shared = Pass(self.position, prepared, plan, key_bias, cache)
        for block in self.blocks:
            hidden = block(hidden, shared)
        if cache is not None:
            cache.positions = seen
        return cast(Tensor, self.norm(hidden))

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int, positions: Tensor | None = None) -> Tensor:
        """Greedy generation: int64 [B, N + max_new_tokens], beginning with the prompt.

        Args:
            input_ids: int64 [B, N], N at least 1.
            positions: of the prompt, as in `hidden`.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: expected at least 0, got {max_new_tokens}")
        if max_new_tokens == 0:
            return input_ids.clone()
        cache, parts, new = KVCache(), [input_ids], input_ids
        given = self._positions(input_ids, positions)
        if self.position.on_host:
            given = given.cpu()
        later = given[..., -1:] + torch.arange(1, max_new_tokens, device=given.device)
        with self.position.frozen(torch.cat([given, later], -1)):
            for step in range(max_new_tokens):
                hidden = self.hidden(new, None if step else given, cache=cache)
                new = self.head(hidden[:, -1:]).argmax(-1)
                parts.append(new)
        return torch.cat(parts, 1)

    def _positions(self, input_ids: Tensor, positions: Tensor | None, cache: KVCache | None = None) -> Tensor:
        """Positions [N] or [B, N] of these tokens: those given, or those that follow."""
        count = input_ids.shape[-1]
        if positions is None:
            place = torch.device("cpu") if self.position.on_host else input_ids.device
            return torch.arange(count, device=place) if cache is None else cache.next_positions(count, place)
        if positions.dim() not in (1, 2) or positions.shape[-1] != count:
            raise ValueError(f"positions: expected [{count}] or [B, {count}], got shape {tuple(positions.shape)}")
        return positions
