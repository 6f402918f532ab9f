"""PackedLayers: a memory whose key heads keep different numbers of keys, one head after another without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import ops
from gistkit.common.checks import placed
from gistkit.hf.keep import Layers
from gistkit.layouts import Plan

# Makes blocks [rows, H, room, D] for keys and values like those given: (rows, room, key, value).
Room = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]


def spans_of(counts: Sequence[Tensor]) -> Tensor:
    """int64 [R, A, 2], where the keys of each head begin and end in those of its layer, see `PackedLayers.of`."""
    ends = [own.flatten().cumsum(0).view(own.shape) for own in counts]
    return torch.cat([torch.stack([end - own, end], -1) for end, own in zip(ends, counts, strict=True)], 1)


class _Block(NamedTuple):
    """Keys and values of one layer: the memory's, and behind them those of a text, [B, H, room, D] flat.

    Args:
        keys, values: [B H, 1, T + B H room, D], the same for all rows.
        biases: [1, 1, T + B H room], or None.
        size: B, room.
        text: address of the text's first key.
    """

    keys: Tensor
    values: Tensor
    biases: Tensor | None
    size: tuple[int, int]
    text: int


class PackedLayers:
    """A memory for `attach` whose heads keep different numbers of keys; a query sees all keys of its head.

    Each row and key head is a row of one call of `ops.attention`, which sees its own keys among all of the layer.

    Args:
        layers: (key, value) of each layer, [T, D], keys rotated.
        spans: [R, A, 2] on the CPU, for each of A heads of all layers where its keys begin and end in those of its
            layer. Of a pass's B rows B / R in a row read the same keys.
        heads: key heads of each layer.
        biases: float32 [T] of each layer, added to the logits of its keys; None: none.
    """

    def __init__(
        self, layers: Layers, spans: Tensor, heads: Sequence[int], biases: Sequence[Tensor] | None = None
    ) -> None:
        self.layers, self.heads, self.biases = list(layers), list(heads), biases
        self._blocks: list[_Block | None] = [None] * len(layers)
        # Of blocks of one size, int32 [B, A, 1, 1, 1], where the text of each row and head begins.
        self._starts: tuple[tuple[int, int], Tensor] | None = None
        self._see(spans)

    def _see(self, spans: Tensor) -> None:
        self.rows = len(spans)
        parts = spans.split(self.heads, 1)
        self._most = [int((part[..., 1] - part[..., 0]).max()) if self.rows else 0 for part in parts]
        # [R, A, 1, 1, 2].
        self._spans = placed(spans.int(), self.layers[0][0].device)[:, :, None, None]
        # Of the last pass the plan of its text, B, the blocks' size, and the plans that these make for each layer.
        self._pass: tuple[Plan, int, tuple[int, int], list[Plan]] | None = None

    def seen(self, spans: Tensor) -> PackedLayers:
        """The same keys, and texts, of other rows."""
        others = copy(self)
        others._see(spans)
        return others

    @classmethod
    def of(cls, layers: Layers, counts: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> PackedLayers:
        """What holds the heads of a row one after another, row by row.

        Args:
            layers, biases: see above.
            counts: of each layer int64 [R, Hk], how many keys each head has.
        """
        return cls(layers, spans_of(counts), [own.shape[1] for own in counts], biases)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def most(self) -> int:
        """Keys of the layer that has most."""
        return max(len(key) for key, _ in self.layers)

    def room(self, layer: int, rows: int, room: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros [rows, H, room, D] for keys and values like those of a text, in one tensor with the memory's.

        Attention over what lies there copies nothing. Only the last ones of a layer are known.
        """
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
        """`room` in tensors that begin with a layer's keys, values and biases."""
        heads = rows * self.heads[layer]
        first = len(keys) - heads * room
        wide = [part[None, None].expand(heads, -1, -1, -1) for part in (keys, values)]
        bias = None if biases is None else biases[None, None]
        self._blocks[layer] = _Block(wide[0], wide[1], bias, (rows, room), keys[first:].data_ptr())
        # Held once.
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
        """Writes what another holds for a pass of so many rows over the keys, biases and spans held here."""
        self._spans.zero_()[:rows] = other._spans.repeat_interleave(rows // other.rows, 0)
        for layer, (own, others) in enumerate(zip(self.layers, other.layers, strict=True)):
            for part, its in zip(own, others, strict=True):
                part[: len(its)] = its
            biases = cast(_Block, self._blocks[layer]).biases
            if biases is not None and other.biases is not None:
                biases[0, 0, : len(other.biases[layer])] = other.biases[layer]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Plan, dropout: float = 0.0, **options: Any
    ) -> Tensor:
        """Attention [B, Hq, N, D] of queries over the memory and the keys and values [B, H, K, D] of a text.

        Args:
            plan: of the text's keys.
            dropout: of all weights; above 0 `ops.attention_with_dropout` runs.
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
        block = self._blocks[layer]
        if block is not None and not dropout and key.data_ptr() == block.text:
            rows_plan = self._plans(plan, batch, block.size)[layer]
            keys, values, biases = block.keys, block.values, block.biases
            if batch != block.size[0]:
                keys, values = keys[: batch * heads], values[: batch * heads]
        else:
            keys, values, biases, rows_plan = self._columns(layer, key, value, plan)
        tensors = query.reshape(batch * heads, query_heads // heads, count, dim), keys, values, rows_plan
        if biases is not None:
            options["key_bias"] = biases
        if dropout:
            options.pop("softcap", None)
            out = ops.attention_with_dropout(*tensors, dropout=dropout, **options)
        else:
            out = cast(Tensor, ops.attention(*tensors, **options))
        return out.reshape(batch, query_heads, count, -1)

    def _plans(self, plan: Plan, batch: int, size: tuple[int, int]) -> list[Plan]:
        """For each layer that of its rows over blocks of a size."""
        known = self._pass
        if known is None or known[0] is not plan or known[1:3] != (batch, size):
            spans = _spans(self._spans, plan, batch, self._starts_of(*size)[:batch])
            own, more = spans.split(self.heads, 1), size[0] * size[1]
            keys = [len(key) + heads * more for (key, _), heads in zip(self.layers, self.heads, strict=True)]
            plans = [Plan(part.flatten(0, 1), number) for part, number in zip(own, keys, strict=True)]
            self._pass = known = plan, batch, size, plans
        return known[3]

    def _columns(
        self, layer: int, key: Tensor, value: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor, Tensor | None, Plan]:
        """Keys and values [B H, 1, M + K, D], biases and a plan, with M columns as the head with most needs.

        A gradient has a copy of the keys for each head, which so is of its own.
        """
        memory, most, batch = self.layers[layer], self._most[layer], len(key)
        own_spans = self._spans.split(self.heads, 1)[layer]
        start, end = own_spans[:, :, 0, 0].unbind(-1)
        places = start[..., None] + torch.arange(most, device=start.device)
        places = places.clamp(max=max(0, len(memory[0]) - 1)).long()

        def columns(kept: Tensor) -> Tensor:
            return kept[places].repeat_interleave(batch // self.rows, 0)

        keys, values = (
            torch.cat([columns(kept.to(own.dtype)), own], 2).flatten(0, 1)[:, None]
            for kept, own in zip(memory, (key, value), strict=True)
        )
        biases = None
        if self.biases is not None:
            biases = F.pad(columns(_wide(self.biases[layer], key)), (0, key.shape[2])).flatten(0, 1)[:, None]
        seen = torch.stack([torch.zeros_like(start), end - start], -1)[:, :, None, None]
        spans = _spans(seen, plan, batch, most)
        return keys, values, biases, Plan(spans.flatten(0, 1), most + plan.num_keys)


def _spans(memory: Tensor, plan: Plan, batch: int, starts: Tensor | int) -> Tensor:
    """int32 [B, A, N, 1 + S, 2], what queries see of a memory, [R, A, 1, 1, 2], and of texts that begin at `starts`."""
    if batch > len(memory):
        memory = memory.repeat_interleave(batch // len(memory), 0)
    text = (plan.spans[:, None] + starts).expand(batch, memory.shape[1], -1, -1, -1)
    return torch.cat([memory.expand(-1, -1, plan.num_queries, -1, -1), text], 3)


def _wide(biases: Tensor, key: Tensor) -> Tensor:
    """Biases in the dtype in which logits of keys are added up."""
    return biases.to(torch.promote_types(key.dtype, torch.float32))
