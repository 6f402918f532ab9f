"""Rows: answers that are written together; prompts are read in parts, and one joins or leaves between two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, CacheLayerMixin

from gistkit.common.checks import POSITIONS, padded
from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import Reading
from gistkit.compress.memory import Memory
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.tokens import pad
from gistkit.hf.attention import Part, Parts
from gistkit.hf.packed import PackedLayers, Room, spans_of
from gistkit.layouts import Plan

# Tokens of prompts that are read between two passes of the others.
PART = 256
# Keys that a block of rows grows by.
_STEP = 64


class Row:
    """An answer: what its prompt and its own tokens are and see, of which some are read.

    Args:
        compressor: reads, inside `generation.answering`.
        memory: of one row; None: the model reads the prompt with nothing before it.
        prompt: token ids, at least one.
        count: tokens to write, at most.
    """

    def __init__(self, compressor: Compressor, memory: Memory | None, prompt: Sequence[int], count: int) -> None:
        lm, text = compressor.lm, pad([prompt], compressor.lm.device)
        self.memory = None if memory is None or memory.counts is None else memory
        """What is read beside the block's keys, if it is packed."""
        self.layers: list[tuple[Tensor, ...]] = []
        """Keys and values [H, keys, D] of each layer before the prompt, until `Rows` has them."""
        self.biases: list[Tensor] | None = None
        if memory is None:
            self._lead = lm.embedded(compressor.reader, text.ids)[0]
            widths = len(prompt), count
            rows = (ReadingRow(0, b"", b"", 0, 0, widths),)
            plan = decoder_plan(rows, 0, widths, False, lm.windows, str(lm.device))
        else:
            reading = Reading(compressor, memory, text, "qa", count)
            self._lead, plan, cache = reading.lead[0], reading.plan, reading.cache
            if memory.layers is not None and self.memory is None:
                self.layers = [tuple(tensor[0] for tensor in layer) for layer in cache.held]
            if cache.key_biases is not None:
                self.biases = [bias[0] for bias in cache.key_biases]
        self.end = plan.num_keys
        """Keys of the whole answer."""
        self.keys = self.end - plan.num_queries
        """Keys that are read."""
        self._first = self.keys
        self._spans = {width: one.spans[0].cpu() for width, one in {0: plan, **plan.windowed}.items()}
        self._positions = torch.atleast_2d(cast(Tensor, plan.positions))[0].cpu()

    @property
    def read(self) -> int:
        """Tokens that are read, of the prompt and then of the answer."""
        return self.keys - self._first

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are not."""
        return max(len(self._lead) - self.read, 0)

    def part(self, most: int) -> Tensor:
        """Embeddings [n, d] of the prompt's next tokens, at most so many."""
        return self._lead[self.read : self.read + most]

    def positions(self, count: int) -> Tensor:
        """[count], of the next tokens."""
        return self._positions[self.read : self.read + count]

    @property
    def windows(self) -> Sequence[int]:
        """Widths of sliding windows, and 0 for layers without."""
        return list(self._spans)

    def spans(self, width: int, count: int) -> Tensor:
        """[count, S, 2], the keys that the next tokens see in layers with a window of `width`, or 0 for none."""
        return self._spans[width][self.read : self.read + count]


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [rows, H, room, D], made like the first that come."""

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
        # Of each token of the pass.
        self.rows = self.places = torch.zeros(0, dtype=torch.int64)
        self.size = 0, 0
        """Rows and keys that there is room for."""
        self._blocks: Room = _alone

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: there are rows."""

    def blocks(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._blocks(*self.size, key, value)
        return self.keys, self.values

    def move(self, rows: int, room: int, blocks: Room) -> None:
        """Moves to blocks of as many rows and keys; what is beyond them goes."""
        if self.keys is not None and self.values is not None:
            both = blocks(rows, room, self.keys, self.values)
            for block, old in zip(both, (self.keys, self.values), strict=True):
                block[: len(old), :, : old.shape[2]] = old[:rows, :, :room]
            self.keys, self.values = both
        self.size, self._blocks = (rows, room), blocks

    def put(self, row: int, parts: Sequence[Tensor]) -> None:
        """Writes keys and values [H, keys, D] at the beginning of a row."""
        for block, part in zip(self.blocks(*(part[None] for part in parts)), parts, strict=True):
            block[row, :, : part.shape[1]] = part

    def place(self, targets: Sequence[int], sources: Sequence[int], keys: int) -> None:
        """Puts the first keys and values of some rows into the places of others."""
        for block in (self.keys, self.values):
            if block is not None:
                block[targets, :, :keys] = block[sources, :, :keys]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes those of the tokens of a pass, [1, H, T, D], and returns all."""
        both = self.blocks(key_states, value_states)
        for block, states in zip(both, (key_states, value_states), strict=True):
            block[self.rows, :, self.places] = states[0].transpose(0, 1)
        return both

    def get_seq_length(self) -> int:
        """A number without meaning: tokens stand where the plan says."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and 0."""
        return self.size[1], 0

    def get_max_length(self) -> int:
        """-1, for no limit."""
        return -1


class Rows:
    """The rows that write, then those whose prompts are read, in one block of keys and values.

    Args:
        compressor: reads, inside `generation.answering`.
        tokens: that the block has room for, where the rows need no more.
    """

    def __init__(self, compressor: Compressor, tokens: int) -> None:
        self._compressor, self._tokens = compressor, tokens
        self._rows: list[Row] = []
        # How many of them write.
        self._count = 0
        self._layers = [_Layer() for _ in range(compressor.lm.config.num_hidden_layers)]
        # Until a row comes or goes, of those that a pass reads for.
        self._bias: list[Tensor] | None = None
        self._packed: dict[tuple[Row, ...], PackedLayers] = {}
        # By identity those whose keys and values are held one after another, before the block's, and where their heads
        # are. What no row reads any more goes with the next one that comes, or when it is more than half.
        self._memories: Mapping[int, Memory] = {}
        self._spans: dict[int, Tensor] = {}
        # Where they stand in layers with a sliding window.
        self._seen: dict[int, list[int]] = {}
        self._held: PackedLayers | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def writing(self) -> Sequence[Row]:
        """The rows whose prompts are read."""
        return self._rows[: self._count]

    @property
    def reading(self) -> Sequence[Row]:
        """The others."""
        return self._rows[self._count :]

    @property
    def longest(self) -> int:
        """Keys of the longest answer."""
        return max((row.end for row in self._rows), default=0)

    @property
    def packed(self) -> int:
        """Tokens of memories beside those, which rows may share."""
        return _tokens({**self._memories, **_memories(self._rows)})

    def holds(self, memory: Memory | None) -> bool:
        """Whether `packed` counts a memory."""
        return id(memory) in {**self._memories, **_memories(self._rows)}

    def join(self, row: Row) -> None:
        """Takes a row of which nothing is read yet."""
        self._make_room(len(self) + 1, max(self.longest, row.end))
        for layer, parts in zip(self._layers, row.layers, strict=bool(row.layers)):
            layer.put(len(self), parts)
        row.layers = []
        self._rows.append(row)
        self._changed()

    def _changed(self) -> None:
        self._bias, self._packed = None, {}

    def _make_room(self, count: int, longest: int) -> None:
        """Has room for as many rows and keys, and for more only within `tokens`."""
        # A failure between two layers leaves them of two shapes.
        for index, layer in enumerate(self._layers):
            rows, room = layer.size
            if count > rows:
                rows = 1 << (count - 1).bit_length()
            if longest > room:
                room = -(-longest // _STEP) * _STEP
            if rows * room > self._tokens:
                rows, room = count, longest
            if (rows, room) != layer.size:
                layer.move(rows, room, self._blocks(index))

    def _blocks(self, layer: int) -> Room:
        return _alone if self._held is None else partial(self._held.room, layer)

    def leave(self, row: Row) -> None:
        """Lets a row go; the last one of its kind takes its place."""
        index = self._rows.index(row)
        self._count -= int(index < self._count)
        places = sorted({index, max(index, self._count), len(self) - 1})
        self._place(places[:-1], places[1:])
        self._rows.pop()
        self._changed()
        if 2 * _tokens(_memories(self._rows)) < _tokens(self._memories):
            self._hold({})

    def _place(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Puts rows into the places of others."""
        if targets != sources:
            rows = [self._rows[source] for source in sources]
            for layer in self._layers:
                layer.place(targets, sources, max(row.keys for row in rows))
            for target, row in zip(targets, rows, strict=True):
                self._rows[target] = row

    def read(self, tokens: Mapping[Row, int], reading: Sequence[Row]) -> list[tuple[Row, Tensor]]:
        """Reads the next tokens of rows in a pass; those of which a token follows, with its logits [V].

        Args:
            tokens: of all rows that write, or of none.
            reading: of which the next part of the prompt is read: all, or one without others.
        """
        lm, reader = self._compressor.lm, self._compressor.reader
        # Models may choose tokens for which they have no embedding.
        ids = torch.tensor([*tokens.values()], dtype=torch.int64, device=lm.device).clamp(0, lm.vocabulary - 1)
        # Frequencies that change depend on how long a pass is.
        most = POSITIONS if lm.changing_rope else max(1, PART // max(1, len(reading)))
        inputs = [*lm.embedded(reader, ids[None])[0][:, None], *(row.part(most) for row in reading)]
        rows, counts = [*tokens, *reading], [*map(len, inputs)]
        first = self._rows.index(rows[0])
        places = torch.cat([torch.arange(row.keys, row.keys + n) for row, n in zip(rows, counts, strict=True)])
        own = torch.arange(first, first + len(rows)).repeat_interleave(torch.tensor(counts)).to(lm.device)
        places = places.to(lm.device)
        for layer in self._layers:
            layer.rows, layer.places = own, places
        positions = torch.cat([row.positions(n) for row, n in zip(rows, counts, strict=True)])
        out = lm.run(
            reader, inputs_embeds=torch.cat(inputs)[None], position_ids=positions[None].to(lm.device),
            cache=cast(Any, Cache(layers=[*self._layers])), parts=self._parts(first, counts, len(tokens)),
        )  # fmt: skip
        known = [index for index, row in enumerate(rows) if row.unread <= counts[index]]
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = lm.logits(out.last_hidden_state[0, ends[known]])
        for row, count in zip(rows, counts, strict=True):
            row.keys += count
        for row in [rows[index] for index in known if index >= len(tokens)]:
            # It writes now.
            swapped = [self._count, self._rows.index(row)]
            self._place(swapped, swapped[::-1])
            self._count += 1
            self._changed()
        return [(rows[index], one) for index, one in zip(known, logits, strict=True)]

    def _parts(self, first: int, counts: Sequence[int], writing: int) -> Parts:
        """How attention takes the next tokens of rows, `counts` of each, of which the first `writing` write."""
        # What waits is not held for the others' sake; what writes is, so that a prompt takes no room from it.
        memories = _memories([*self.writing, *self._rows[first : first + len(counts)]])
        if memories.keys() - self._memories.keys():
            # What is held goes first, and stays away if there is no room.
            self._hold({})
            self._hold(memories)
        starts, device = torch.tensor([0, *counts]).cumsum(0), self._compressor.lm.device
        parts, real = [], []
        for begin, end in ((0, writing), (writing, len(counts))):
            if begin == end:
                continue
            rows, sizes = slice(first + begin, first + end), counts[begin:end]
            each = [*zip(self._rows[rows], sizes, strict=True)]
            places, seen = torch.arange(max(sizes)), max(row.keys + n for row, n in each)
            spans = {width: _padded([row.spans(width, n) for row, n in each]) for width in each[0][0].windows}
            positions = pad_sequence([row.positions(n) for row, n in each], batch_first=True)
            plan = Plan(spans.pop(0), seen, positions).with_windows(spans).to(device)
            tokens = (starts[begin:end, None] + places).clamp(max=int(starts[-1]) - 1).to(device)
            parts.append(Part(tokens, rows, plan, self._memory(self._rows[rows]), self._biases(rows, seen)))
            real.append((places < torch.tensor(sizes)[:, None]).flatten())
        held = torch.cat(real)
        return Parts(parts, None if bool(held.all()) else held.nonzero()[:, 0].to(device))

    def _memory(self, rows: Sequence[Row]) -> PackedLayers | None:
        """The packed memories of rows, of which some may be the same; None: there is none in the block."""
        if not self._memories:
            return None
        # Rows that write and those that are read have plans of their own, which all layers share.
        if (known := (*rows,)) not in self._packed:
            ids = [0 if row.memory is None else id(row.memory) for row in rows]
            # One that all rows read is read once.
            ids = ids if len({*ids}) > 1 else ids[:1]
            held = cast(PackedLayers, self._held)
            seen = padded([self._seen[each] for each in ids], POSITIONS)
            self._packed[known] = held.seen(torch.cat([self._spans[each] for each in ids]), seen)
        return self._packed[known]

    def _hold(self, memories: Mapping[int, Memory]) -> None:
        """Has the block behind these, or by itself."""
        self._held = held = _together([*memories.values()]) if memories else None
        self._memories, self._packed = {}, {}
        for index, layer in enumerate(self._layers):
            layer.move(*layer.size, self._blocks(index))
        if held is None:
            return
        first = torch.zeros(sum(held.heads), 1, dtype=torch.int64)
        self._spans, self._seen = {0: first.expand(1, -1, 2)}, {0: []}
        for key, memory in memories.items():
            counts, self._seen[key] = memory.counts or (), memory.places[0].tolist()
            self._spans[key] = spans_of(counts) + first
            sizes = torch.tensor([int(own.sum()) for own in counts])
            first = first + sizes.repeat_interleave(torch.tensor(held.heads))[:, None]
        self._memories = memories

    def _biases(self, rows: slice, seen: int) -> list[Tensor] | None:
        """For each layer what is added to the logits of keys, [B, H, keys]; None: nothing."""
        if all(row.biases is None for row in self._rows):
            return None
        if self._bias is None:
            self._bias = []
            for index, layer in enumerate(self._layers):
                keys = cast(Tensor, layer.keys)
                bias = keys.new_zeros(len(self), keys.shape[1], self.longest, dtype=torch.float32)
                for place, row in enumerate(self._rows):
                    if row.biases is not None:
                        own = row.biases[index]
                        bias[place, :, : own.shape[-1]] = own
                self._bias.append(bias)
        return [bias[rows, :, :seen] for bias in self._bias]


def _padded(spans: Sequence[Tensor]) -> Tensor:
    """int32 [B, N, S, 2] of spans [n, S, 2]; what is added sees nothing."""
    count, most = (max(one.shape[dim] for one in spans) for dim in (0, 1))
    return torch.stack([F.pad(one, (0, 0, 0, most - one.shape[1], 0, count - len(one))) for one in spans])


def _memories(rows: Sequence[Row]) -> dict[int, Memory]:
    """The packed memories that rows read, by identity."""
    return {id(row.memory): row.memory for row in rows if row.memory is not None}


def _tokens(memories: Mapping[int, Memory]) -> int:
    return sum(memory.sizes[0] for memory in memories.values())


def _alone(rows: int, room: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A `Room` of nothing else."""
    keys, values = (like.new_zeros(rows, like.shape[1], room, like.shape[3]) for like in (key, value))
    return keys, values


def _together(memories: Sequence[Memory]) -> PackedLayers:
    """Packed memories one after another, seen by nobody yet."""
    layers = []
    for layer in zip(*(memory.layers or () for memory in memories), strict=True):
        keys, values = zip(*layer, strict=True)
        layers.append((torch.cat(keys), torch.cat(values)))
    heads = [own.shape[1] for own in memories[0].counts or ()]
    biases = None
    if any(memory.key_bias is not None for memory in memories):
        parts = (
            memory.packed_biases or [key.new_zeros(len(key), dtype=torch.float32) for key, _ in memory.layers or ()]
            for memory in memories
        )
        biases = [torch.cat(layer) for layer in zip(*parts, strict=True)]
    return PackedLayers(layers, torch.zeros(0, sum(heads), 2), heads, biases)
