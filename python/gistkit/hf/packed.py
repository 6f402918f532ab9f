"""PackedLayers: a memory whose key heads keep different numbers of keys, one head after another without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import ops
from gistkit.common.checks import POSITIONS, placed
from gistkit.hf.keep import Layers
from gistkit.layouts import Plan

# Makes blocks [rows, H, room, D] for keys and values like those given: (rows, room, key, value).
Room = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]


def spans_of(counts: Sequence[Tensor]) -> Tensor:
    """int64 [R, A, 2], start and end of each head's keys among the keys of its layer, see `PackedLayers.of`."""
    ends = [own.flatten().cumsum(0).view(own.shape) for own in counts]
    return torch.cat([torch.stack([end - own, end], -1) for end, own in zip(ends, counts, strict=True)], 1)


def plain_room(rows: int, room: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks for keys and values in their own tensors."""
    keys, values = (like.new_empty((rows, like.shape[1], room, like.shape[3])) for like in (key, value))
    return keys, values


class _Block(NamedTuple):
    """Keys and values of one layer: the memory's, then those of a text, [B, H, room, D] flat.

    Args:
        keys, values: [T + B H room, D].
        biases: [1, 1, T + B H room], or None.
        size: B, room.
        text: address of the text's first key.
    """

    keys: Tensor
    values: Tensor
    biases: Tensor | None
    size: tuple[int, int]
    text: int

    def row_of(self, text: Tensor) -> int | None:
        """The row with which a text [B, H, K, D] of this block begins; None: it is elsewhere."""
        rows, room = self.size
        first, odd = divmod(text.data_ptr() - self.text, text.shape[1] * room * text.shape[3] * text.element_size())
        return first if not odd and 0 <= first <= rows - len(text) else None


class PackedLayers:
    """A memory for `attach` whose heads keep different numbers of keys.

    A query sees all keys of its head, or in a layer with a sliding window those less than its width before the query's
    position.

    If the text's keys follow the memory's in one tensor, and no two rows share a memory, a layer is one call of
    `ops.attention`: each row and key head is a row of the call and sees its own keys. Otherwise the memory has its own
    call. Rows that share a memory are then more queries of a head, so that it is read once.

    Args:
        layers: (key, value) of each layer, [T, D], keys rotated.
        spans: [R, A, 2] on the CPU, start and end of the keys of each of A heads of all layers, among the keys of its
            layer. B / R consecutive rows of a pass of B rows share a memory.
        heads: key heads of each layer.
        biases: float32 [T] of each layer, added to the logits of its keys; None: none.
        places: int64 [R, n], ascending, where the keys of a head stand in layers with a sliding window, counted as
            position IDs are; `POSITIONS` where a row has less. None: the model has no such layers.
    """

    def __init__(
        self,
        layers: Layers,
        spans: Tensor,
        heads: Sequence[int],
        biases: Sequence[Tensor] | None = None,
        places: Tensor | None = None,
    ) -> None:
        self.layers, self.heads, self.biases = list(layers), list(heads), biases
        self._blocks: list[_Block | None] = [None] * len(layers)
        # The size of blocks, and int32 [B, A, 1, 1, 1], where the text of each row and head starts in them.
        self._starts: tuple[tuple[int, int], Tensor] | None = None
        self._see(spans, places)

    def _see(self, spans: Tensor, places: Tensor | None) -> None:
        self.rows = len(spans)
        parts = spans.split(self.heads, 1)
        self._most = [int((part[..., 1] - part[..., 0]).max()) if self.rows else 0 for part in parts]
        # [R, A, 1, 1, 2].
        self._spans = placed(spans.int(), self.layers[0][0].device)[:, :, None, None]
        self._places = None if places is None else placed(places, self._spans.device)
        # By window, and with a text or without: what the last plans of layers were made for, and these.
        self._known: dict[tuple[int | None, bool], tuple[Any, list[Plan]]] = {}

    def seen(self, spans: Tensor, places: Tensor | None) -> PackedLayers:
        """The same keys and texts, read by other rows."""
        others = copy(self)
        others._see(spans, places)
        return others

    @classmethod
    def of(
        cls,
        layers: Layers,
        counts: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        places: Tensor | None = None,
    ) -> PackedLayers:
        """A memory that stores row after row, and in each row head after head.

        Args:
            layers, biases, places: see above.
            counts: int64 [R, Hk] for each layer, the number of keys of each head.
        """
        return cls(layers, spans_of(counts), [own.shape[1] for own in counts], biases, places)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def most(self) -> int:
        """The largest number of keys of a layer."""
        return max(len(key) for key, _ in self.layers)

    def room(self, layer: int, rows: int, room: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros [rows, H, room, D] for a text's keys and values, in one tensor with the memory's.

        Attention over this tensor copies nothing. Only the last one of each layer is remembered. If rows share the
        memory, which then has its own call, the tensors are separate and uninitialised.
        """
        if rows > self.rows > 0:
            self._blocks[layer] = None
            return plain_room(rows, room, key, value)
        first, more = len(self.layers[layer][0]), rows * self.heads[layer] * room
        # No key is NaN, which attention would look for.
        flat = [like.new_zeros(first + more, like.shape[-1]) for like in (key, value)]
        for block, part in zip(flat, self.layers[layer], strict=True):
            block[:first] = part
        biases = None if self.biases is None else F.pad(_wide(self.biases[layer], key), (0, more))
        return self.lie(layer, rows, room, flat[0], flat[1], biases)

    def lie(
        self, layer: int, rows: int, room: int, keys: Tensor, values: Tensor, biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`room` in tensors that start with a layer's keys, values and biases."""
        heads = rows * self.heads[layer]
        first = len(keys) - heads * room
        bias = None if biases is None else biases[None, None]
        self._blocks[layer] = _Block(keys, values, bias, (rows, room), keys[first:].data_ptr())
        # The memory is stored once.
        self.layers[layer] = keys[:first], values[:first]
        self._starts_of(rows, room)
        size = rows, self.heads[layer], room, -1
        return keys[first:].view(size), values[first:].view(size)

    def _starts_of(self, rows: int, room: int) -> Tensor:
        if self._starts is None or self._starts[0] != (rows, room):
            starts = [
                len(keys) + torch.arange(0, rows * heads * room, room, dtype=torch.int32).view(rows, heads)
                for (keys, _), heads in zip(self.layers, self.heads, strict=True)
            ]
            self._starts = (rows, room), placed(torch.cat(starts, 1), self._spans.device)[..., None, None, None]
        return self._starts[1]

    def take(self, other: PackedLayers, rows: int) -> None:
        """Copies the keys, biases, spans and places of another memory, for a pass of `rows` rows, into this one's."""
        self._spans.zero_()[:rows] = other._spans.repeat_interleave(rows // other.rows, 0)
        if self._places is not None and other._places is not None:
            places = other._places.repeat_interleave(rows // other.rows, 0)
            self._places.fill_(POSITIONS)[:rows, : places.shape[1]] = places
        for layer, (own, others) in enumerate(zip(self.layers, other.layers, strict=True)):
            for part, its in zip(own, others, strict=True):
                part[: len(its)] = its
            biases = cast(_Block, self._blocks[layer]).biases
            if biases is not None and other.biases is not None:
                biases[0, 0, : len(other.biases[layer])] = other.biases[layer]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: Plan,
        window: int | None = None,
        dropout: float = 0.0,
        cached: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention [B, Hq, N, D] of queries over the memory and the keys and values [B, H, K, D] of a text.

        Args:
            plan: of the text's keys.
            window: width of the layer's sliding window; the memory must have places, and the plan position IDs.
            dropout: of all weights; above 0 `ops.attention_with_dropout` runs.
            cached: the text's keys in the cache, if `key` is a copy of them in another dtype.
            options: those of `ops.attention`.
        """
        heads, (batch, query_heads, count, dim) = self.heads[layer], query.shape
        if batch % self.rows or query_heads % heads:
            raise ValueError(
                f"memory: expected queries of {self.rows} rows or a multiple, and of {heads} heads or a multiple, for "
                f"layer {layer}, got {batch} rows of {query_heads} heads"
            )
        if plan.num_keys != key.shape[2]:
            raise ValueError(f"plan: expected one for the text's {key.shape[2]} keys, got one for {plan.num_keys}")
        if window is not None and (self._places is None or plan.positions is None):
            raise ValueError(
                "sliding_window: expected none over a memory whose heads keep different numbers of keys, unless it has "
                f"their places and the plan position IDs, got {window}"
            )
        block = self._blocks[layer]
        first = None if block is None else block.row_of(key if cached is None else cached)
        if block is None or first is None or dropout or batch > self.rows:
            return self._beside(layer, query, (key, value, plan), window, dropout, options)
        rows_plan = self._plans(plan, window, 1, block.size, first)[layer]
        flat = query.reshape(batch * heads, query_heads // heads, count, dim)
        keys, values = (_of_each(part.to(query.dtype), len(flat)) for part in (block.keys, block.values))
        out = cast(Tensor, ops.attention(flat, keys, values, rows_plan, key_bias=block.biases, **options))
        return out.reshape(batch, query_heads, count, -1)

    def _seen_spans(self, plan: Plan, window: int | None, copies: int) -> Tensor:
        """int32 [R, A, queries, 1, 2], what of the memory is seen by the queries of `copies` rows that share it."""
        queries = copies * plan.num_queries
        spans = self._spans.expand(-1, -1, queries, -1, -1)
        if window is None:
            return spans
        hidden = torch.atleast_2d(cast(Tensor, plan.positions)) - window
        hidden = hidden.expand(self.rows * copies, -1).reshape(self.rows, queries, 1)
        before = (cast(Tensor, self._places)[:, None] <= hidden).sum(-1).int()
        start, end = spans.unbind(-1)
        return torch.stack([torch.minimum(start + before[:, None, :, None], end), end], -1)

    def _plans(
        self, plan: Plan, window: int | None, copies: int, size: tuple[int, int] | None, first: int = 0
    ) -> list[Plan]:
        """The plan of each layer, with a window or without, over the memory and blocks of a size; None: over it alone.

        Args:
            plan: of a text of rows of which `copies` share a memory.
            first: of these rows in the blocks.
        """
        # All queries see the same of a memory alone.
        any_text = size is None and window is None
        made_for = copies * plan.num_queries, size, first, None if any_text else plan
        known = self._known.get((window, size is None))
        if known is None or known[0] != made_for:
            spans, more = self._seen_spans(plan, window, copies), 0
            if size is not None:
                text = plan.spans[:, None] + self._starts_of(*size)[first : first + self.rows]
                spans, more = torch.cat([spans, text], 3), size[0] * size[1]
            keys = [len(key) + heads * more for (key, _), heads in zip(self.layers, self.heads, strict=True)]
            own = (part.flatten(0, 1).contiguous() for part in spans.split(self.heads, 1))
            known = made_for, [Plan(part, number) for part, number in zip(own, keys, strict=True)]
            self._known[window, size is None] = known
        return known[1]

    def _beside(
        self,
        layer: int,
        query: Tensor,
        text: tuple[Tensor, Tensor, Plan],
        window: int | None,
        dropout: float,
        options: dict[str, Any],
    ) -> Tensor:
        """Attention over the memory in its own call, in which rows that share it are more queries."""

        def attention(*tensors: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            out, lse = ops.attention(*tensors, return_lse=True, key_bias=bias, **options)
            if dropout:
                scale = options.get("scale")
                out = ops.attention_with_dropout(*tensors, dropout=dropout, scale=scale, key_bias=bias)
            return out, lse

        (batch, query_heads, count, dim), heads = query.shape, self.heads[layer]
        copies, group = batch // self.rows, query_heads // heads
        flat = query.reshape(self.rows, copies, heads, group, count, dim).permute(0, 2, 3, 1, 4, 5)
        flat = flat.reshape(self.rows * heads, group, copies * count, dim)
        keys, values = (part.to(query.dtype) for part in self.layers[layer])
        biases = None if self.biases is None else _wide(self.biases[layer], query)
        plan = self._plans(text[2], window, copies, None)[layer]
        if torch.is_grad_enabled() and len(keys) and any(part.requires_grad for part in (query, keys, values)):
            # A gradient has a copy of the keys for each head: these get columns of their own, as the longest needs.
            first = self._spans.split(self.heads, 1)[layer][..., :1].flatten(0, 1)
            places = first[:, 0, 0] + torch.arange(self._most[layer], device=first.device)
            places = places.clamp(max=len(keys) - 1).long()
            keys, values, biases = keys[places], values[places], None if biases is None else biases[places]
            plan = Plan(plan.spans - first, places.shape[1])
        bias = None if biases is None else torch.atleast_2d(biases)[:, None]
        shape = self.rows, heads, group, copies, count
        parts = attention(flat, _of_each(keys, len(flat)), _of_each(values, len(flat)), plan, bias=bias)
        own, own_lse = (
            part.view(*shape, -1).permute(0, 3, 1, 2, 4, 5).reshape(batch, query_heads, count, -1) for part in parts
        )
        out, lse = attention(query, *text)
        return ops.merge_attention(out, lse, own, own_lse[..., 0])[0]


def _of_each(part: Tensor, rows: int) -> Tensor:
    """Keys or values as [rows, 1, T, D], from one tensor [T, D] for all rows or one for each, [rows, T, D]."""
    return part.unsqueeze(-3).expand(rows, 1, -1, -1)


def _wide(biases: Tensor, key: Tensor) -> Tensor:
    """Biases in the dtype of the logits."""
    return biases.to(torch.promote_types(key.dtype, torch.float32))
