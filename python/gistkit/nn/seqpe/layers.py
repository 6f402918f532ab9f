"""A layer of SeqPE's encoder, plain and over a trie of digits, which computes what positions share once.

The two forms have equal outputs and gradients, for three reasons. A causal encoder's state at a digit depends only on
the digits before it, so positions share the states of common prefixes. Layer 1 sees a few distinct vectors, the
symbols: its attention mixes rows of a table (values through the output projection), and since LayerNorm only centres
and scales what is linear in that mixture, so does its first feed-forward product. The last layer is needed at [CLS].

Dropout gives every position masks of its own. One mask a node would leave each position's distribution as it is, but
positions with a common prefix would share their noise, and losses of pairs of embeddings see that. So states are shared
up to the first mask, after layer 1's attention, and are a position's own from there on: its feed-forward network, and
the keys and values of the next layer, run on every digit of every position. What is left out is half of the plain
form's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit.layouts.links import Links
from gistkit.nn.seqpe.trie import DigitTrie
from gistkit.ops.trie import ancestor_attention, bias_gelu, trie_mix

# Without gradients the widest tensors are made of so many rows at a time, which stay in a cache and in ready pages.
ROWS = 512


class DigitLayer(nn.Module):
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
        hidden = hidden + self.dropout(self.attend(hidden))
        return hidden + self.dropout(self.network(hidden))

    def attend(self, hidden: Tensor, *, last: bool = False) -> Tensor:
        """What attention adds to hidden [P, T, dim], [P, T, dim], or only at the last token, [P, 1, dim]."""
        dim = hidden.shape[-1]
        normed = self.norm_1(hidden)
        sizes = [dim, 2 * dim]
        (query_weight, weight), (query_bias, bias) = self.qkv.weight.split(sizes), self.qkv.bias.split(sizes)
        query = F.linear(normed[:, -1:] if last else normed, query_weight, query_bias)
        query, key, value = (
            x.unflatten(-1, (self.heads, dim // self.heads)).transpose(1, 2)
            for x in (query, *F.linear(normed, weight, bias).chunk(2, -1))
        )
        dropped = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=not last)
        return cast(Tensor, self.attention_out(mixed.transpose(1, 2).flatten(2)))

    def network(self, hidden: Tensor) -> Tensor:
        """What the feed-forward network adds to hidden [.., dim]."""
        return cast(Tensor, self.down(F.gelu(self.up(self.norm_2(hidden)), approximate="tanh")))


def encode_dropped(blocks: Sequence[DigitLayer], symbols: Tensor, trie: DigitTrie) -> Tensor:
    """As `encode`, in training with dropout: masks are drawn for each of the trie's positions, as `plain` draws them.

    States are shared as long as no mask has been drawn: layer 1's attention without its output's dropout. The last
    layer is computed at [CLS].
    """
    last = len(blocks) - 1
    hidden = F.embedding(trie.leaf_paths.rows, symbols)
    for i, block in enumerate(blocks):
        if i == 0 and not block.attention_dropout:
            nodes = trie.leaf_ancestors.rows if last else torch.arange(len(hidden), device=hidden.device)[:, None]
            added = F.embedding(nodes, _first_attention(block, symbols, trie.paths if last else trie.leaf_paths))
        else:
            added = block.attend(hidden, last=i == last)
        hidden = (hidden[:, -1:] if i == last else hidden) + block.dropout(added)
        hidden = hidden + block.dropout(block.network(hidden))
    return hidden[:, 0]


def _first_attention(block: DigitLayer, symbols: Tensor, paths: Links) -> Tensor:
    """What layer 1's attention adds at each node of paths, [N, dim]."""
    with torch.autocast(symbols.device.type, enabled=False):
        scores, table, _ = _attention_table(block, symbols)
        bias = block.attention_out.bias.to(table.dtype).expand(len(symbols), -1)
    return trie_mix(_path_weights(scores, paths.rows), table, bias, paths).to(symbols.dtype)


def encode(blocks: Sequence[DigitLayer], symbols: Tensor, trie: DigitTrie) -> Tensor:
    """States at [CLS] after the last layer, before the final norm, without dropout.

    Args:
        blocks: the encoder's layers.
        symbols: [R, dim] embeddings of the trie's symbols.
        trie: on the symbols' device.

    Returns:
        [U, dim], a row for each distinct position.
    """
    last = len(blocks) - 1
    hidden = _first_layer(blocks[0], symbols, trie.paths if last else trie.leaf_paths)
    for i, block in enumerate(blocks[1:], 1):
        hidden = _layer(block, hidden, trie, leaves_only=i == last)
    return hidden


def _first_layer(block: DigitLayer, symbols: Tensor, paths: Links) -> Tensor:
    # Tables are small, and all that follows inherits their rounding.
    with torch.autocast(symbols.device.type, enabled=False):
        scores, table, base = _attention_table(block, symbols)
        # LayerNorm(x) W' = (x - mean) (gain W)' / deviation + shift W'
        norm, up = block.norm_2, block.up
        matrix = (up.weight * norm.weight).to(table.dtype).mT
        table_up, base_up = _centred(table) @ matrix, _centred(base) @ matrix
        bias = F.linear(norm.bias, up.weight, up.bias).to(table.dtype)

    weights = _path_weights(scores, paths.rows)
    hidden = trie_mix(weights, table, base, paths)
    scale = (_centred(hidden).square().mean(-1) + norm.eps).rsqrt()

    def network(rows: slice) -> Tensor:
        active = bias_gelu(trie_mix(weights[rows], table_up, base_up, paths.of(rows)), bias, scale[rows])
        return block.down(active.to(symbols.dtype))

    return _add(hidden.to(symbols.dtype), network)


def _attention_table(block: DigitLayer, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [R, R, H] of symbols with symbols, their values through the projection [R, H, dim], and what is added to
    those, [R, dim]."""
    compute = torch.promote_types(symbols.dtype, torch.float32)
    count, dim = symbols.shape
    heads, head_dim = block.heads, dim // block.heads
    query, key, value = block.qkv(block.norm_1(symbols)).view(count, 3, heads, head_dim).unbind(1)
    scores = torch.einsum("rhd,shd->rsh", query, key).to(compute) * head_dim**-0.5
    projection = block.attention_out.weight.view(dim, heads, head_dim)
    table = torch.einsum("rhd,ohd->rho", value, projection).to(compute)
    return scores, table, (symbols + block.attention_out.bias).to(compute)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _path_weights(scores: Tensor, paths: Tensor) -> Tensor:
    """Softmax over each node's path of the scores [R, R, H] of its own symbol: [N, M, H]."""
    on_path = paths >= 0
    symbol = paths.gather(1, on_path.sum(1, keepdim=True) - 1)
    pairs = symbol * scores.shape[0] + paths.clamp(min=0)
    gathered = F.embedding(pairs, scores.reshape(-1, scores.shape[2]))
    return gathered.masked_fill(~on_path[..., None], -torch.inf).softmax(1)


def _layer(block: DigitLayer, hidden: Tensor, trie: DigitTrie, leaves_only: bool) -> Tensor:
    dim, heads = hidden.shape[1], block.heads
    first = trie.first_leaf if leaves_only else 0
    normed = block.norm_1(hidden)
    weight, bias = block.qkv.weight, block.qkv.bias
    query = F.linear(normed[first:], weight[:dim], bias[:dim])
    key_value = F.linear(normed, weight[dim:], bias[dim:])
    compute = torch.promote_types(hidden.dtype, torch.float32)
    rows = key_value.to(compute).view(len(hidden), 2, heads, dim // heads)
    mixed = ancestor_attention(
        query.to(compute).view(len(query), heads, -1),
        rows[:, 0],
        rows[:, 1],
        trie.leaf_ancestors if leaves_only else trie.ancestors,
    )
    hidden = hidden[first:] + block.attention_out(mixed.view(len(query), dim).to(hidden.dtype))

    def network(rows: slice) -> Tensor:
        wide = F.linear(block.norm_2(hidden[rows]), block.up.weight)
        return block.down(bias_gelu(wide.to(compute), block.up.bias.to(compute)).to(hidden.dtype))

    return _add(hidden, network)


def _add(hidden: Tensor, network: Callable[[slice], Tensor]) -> Tensor:
    """hidden + network of its rows."""
    if torch.is_grad_enabled() or hidden.device.type != "cpu" or torch.compiler.is_compiling():
        return hidden + network(slice(None))
    out = torch.empty_like(hidden)
    for start in range(0, len(hidden), ROWS):
        rows = slice(start, start + ROWS)
        out[rows] = hidden[rows] + network(rows)
    return out
