"""Rows: answers that are written together; prompts are read in parts, and one joins or leaves between two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, CacheLayerMixin

from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import Reading
from gistkit.compress.memory import Memory
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.tokens import pad
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
        """Embeddings [n, d] of the prompt's next tokens."""
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


class _Places(NamedTuple):
    """Where a pass of rows [first, first + B) writes its keys.

    Args:
        seen: keys of a row that the pass may see.
        rows, keys: of each token.
        tokens: these among the B N of the pass, where some of it is padding.
    """

    first: int
    seen: int
    rows: Tensor
    keys: Tensor
    tokens: Tensor | None


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [B, H, room, D], in which consecutive rows read; made like the first that come."""

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None
    places: _Places

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
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
        """Writes those of the pass, [B, H, N, D], and returns the keys and values of its rows."""
        first, seen, rows, keys, tokens = self.places
        both = self.blocks(key_states, value_states)
        for block, states in zip(both, (key_states, value_states), strict=True):
            flat = states.transpose(1, 2).flatten(0, 1)
            block[rows, :, keys] = flat if tokens is None else flat[tokens]
        return tuple(block[first : first + len(key_states), :, :seen] for block in both)  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        """A number without meaning: tokens stand where the plan says."""
        return self.places.seen - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and 0."""
        return self.places.seen, 0

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
        self._packed: dict[tuple[int, ...], PackedLayers] = {}
        # By identity those whose keys and values are held one after another, before the block's, and where their heads
        # are. What no row reads any more goes with the next one that comes, or when it is more than half.
        self._memories: Mapping[int, Memory] = {}
        self._spans: dict[int, Tensor] = {}
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
        return _tokens({**self._memories, **self._read_memories})

    @property
    def _read_memories(self) -> dict[int, Memory]:
        """The packed memories that rows read, by identity."""
        return {id(row.memory): row.memory for row in self._rows if row.memory is not None}

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
        index, last = self._rows.index(row), len(self) - 1
        chain = [index, last]
        if index < self._count:
            self._count -= 1
            chain = [index, self._count, last]
        chain = [*dict.fromkeys(chain)]
        self._place(chain[:-1], chain[1:])
        self._rows.pop()
        self._changed()
        if 2 * _tokens(self._read_memories) < _tokens(self._memories):
            self._hold({})

    def _place(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Puts rows into the places of others."""
        rows = [self._rows[source] for source in sources]
        for layer in self._layers if rows else ():
            layer.place(targets, sources, max(row.keys for row in rows))
        for target, row in zip(targets, rows, strict=True):
            self._rows[target] = row

    def part(self, reading: Sequence[Row]) -> list[tuple[Row, Tensor]]:
        """Reads the next part of the prompts of consecutive rows; those that write now, with logits [V]."""
        lm = self._compressor.lm
        # Frequencies that change depend on how long a pass is.
        most = max(row.unread for row in reading) if lm.changing_rope else max(1, PART // len(reading))
        parts = [row.part(most) for row in reading]
        states = self._pass(self._rows.index(reading[0]), pad_sequence(parts, batch_first=True), [*map(len, parts)])
        read = [index for index, row in enumerate(reading) if row.unread == len(parts[index])]
        logits = lm.logits(states[read])
        for row, part in zip(reading, parts, strict=True):
            row.keys += len(part)
        for index in read:
            places = [self._count, self._rows.index(reading[index])]
            if len({*places}) > 1:
                self._place(places, places[::-1])
            self._count += 1
        self._changed()
        return [(reading[index], own) for index, own in zip(read, logits, strict=True)]

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads the next token of each row that writes; the logits [B, V] of those that follow."""
        compressor, lm = self._compressor, self._compressor.lm
        # Models may choose tokens for which they have no embedding.
        ids = torch.tensor(tokens, device=lm.device)[:, None].clamp(0, lm.vocabulary - 1)
        logits = lm.logits(self._pass(0, lm.embedded(compressor.reader, ids), [1] * len(tokens)))
        for row in self.writing:
            row.keys += 1
        return logits

    def _pass(self, first: int, inputs: Tensor, counts: Sequence[int]) -> Tensor:
        """Reads the next tokens of consecutive rows, embeddings [B, N, d] padded at the end; the last states [B, d]."""
        compressor, lm, (batch, width, _) = self._compressor, self._compressor.lm, inputs.shape
        rows, sizes = self._rows[first : first + batch], torch.tensor(counts)
        held = torch.arange(width) < sizes[:, None]
        keys = torch.tensor([row.keys for row in rows])[:, None] + torch.arange(width)
        own = torch.arange(first, first + batch)[:, None].expand_as(held)
        seen = int(keys[held].max()) + 1
        places = _Places(
            first, seen, own[held].to(lm.device), keys[held].to(lm.device),
            None if bool(held.all()) else held.flatten().nonzero()[:, 0].to(lm.device),
        )  # fmt: skip
        for layer in self._layers:
            layer.places = places
        each = [*zip(rows, counts, strict=True)]
        spans = {name: _padded([row.spans(name, n) for row, n in each], width) for name in rows[0].windows}
        positions = pad_sequence([row.positions(n) for row, n in each], batch_first=True)
        plan = Plan(spans.pop(0), seen, positions).with_windows(spans).to(lm.device)
        out = lm.run(
            compressor.reader, inputs_embeds=inputs, plan=plan, cache=cast(Any, Cache(layers=[*self._layers])),
            memory=self._memory(rows), key_bias=self._biases(slice(first, first + batch), seen),
        )  # fmt: skip
        return cast(Tensor, out.last_hidden_state[torch.arange(batch), sizes - 1])

    def _memory(self, rows: Sequence[Row]) -> PackedLayers | None:
        """The packed memories of rows, of which some may be the same; None: there is none in the block."""
        if not (memories := self._read_memories):
            return None
        if memories.keys() - self._memories.keys():
            # What is held goes first, and stays away if there is no room.
            self._hold({})
            self._hold(memories)
        ids = tuple(0 if row.memory is None else id(row.memory) for row in rows)
        # One that all rows read is read once.
        ids = ids if len({*ids}) > 1 else ids[:1]
        if ids not in self._packed:
            held = cast(PackedLayers, self._held)
            self._packed[ids] = held.seen(torch.cat([self._spans[each] for each in ids]))
        return self._packed[ids]

    def _hold(self, memories: Mapping[int, Memory]) -> None:
        """Has the block behind these, or by itself."""
        self._held = held = _together([*memories.values()]) if memories else None
        self._memories, self._packed = {}, {}
        for index, layer in enumerate(self._layers):
            layer.move(*layer.size, self._blocks(index))
        if held is None:
            return
        first = torch.zeros(sum(held.heads), 1, dtype=torch.int64)
        self._spans = {0: first.expand(1, -1, 2)}
        for key, memory in memories.items():
            counts = memory.counts or ()
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


def _padded(spans: Sequence[Tensor], count: int) -> Tensor:
    """int32 [B, count, S, 2] of spans [n, S, 2] of rows; what is added sees nothing."""
    most = max(one.shape[1] for one in spans)
    return torch.stack([F.pad(one, (0, 0, 0, most - one.shape[1], 0, count - len(one))) for one in spans])


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
