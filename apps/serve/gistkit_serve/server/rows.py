"""Rows: answers that are written together, a token each in a pass; one joins or leaves between two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from gistkit import hf
from gistkit.common.checks import POSITIONS, padded
from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import Passes, Reading
from gistkit.compress.memory import Memory
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.tokens import pad
from gistkit.hf.packed import PackedLayers, Room, spans_of
from gistkit.layouts import Plan

# Tokens of prompts that are read between two passes of the others.
PART = 256
# Keys that a block of rows grows by.
_STEP = 256


class Row:
    """An answer: its prompt is read some tokens in a pass, and it then goes on in `Rows`.

    Args:
        compressor: reads, inside `generation.answering`.
        memory: of one row; None: the model reads the prompt with nothing before it.
        prompt: token ids, at least one.
        count: tokens to write, at most.
    """

    def __init__(self, compressor: Compressor, memory: Memory | None, prompt: Sequence[int], count: int) -> None:
        lm = self._lm = compressor.lm
        text = pad([prompt], lm.device)
        if memory is None:
            self._lead = lm.embedded(compressor.reader, text.ids)
            widths = len(prompt), count
            rows = (ReadingRow(0, b"", b"", 0, 0, widths),)
            self._plan = decoder_plan(rows, 0, widths, False, lm.windows, str(lm.device))
            self._cache = hf.empty_cache(lm.config.num_hidden_layers, 0)
        else:
            reading = Reading(compressor, memory, text, "qa", count)
            self._lead, self._plan, self._cache = reading.lead, reading.plan, reading.cache
        self._passes, self._read = Passes(compressor, self._cache), 0
        self.end = self._plan.num_keys
        """Keys of the whole answer."""
        self._first = self.end - self._plan.num_queries
        self._spans = {width: one.spans[0].cpu() for width, one in {0: self._plan, **self._plan.windowed}.items()}
        self._positions = torch.atleast_2d(cast(Tensor, self._plan.positions))[0].cpu()
        self.memory = None if memory is None or memory.counts is None else memory
        """What is read beside `layers`, if it is packed."""
        biases = self._cache.key_biases
        self.biases = None if biases is None else [bias[0] for bias in biases]

    def part(self) -> Tensor | None:
        """Reads the next part of the prompt; at its end the logits [V] of the answer's first token."""
        # Frequencies that change depend on how long a pass is.
        size = self._lead.shape[1] if self._lm.changing_rope else PART
        lead = self._lead[:, self._read : self._read + size]
        nothing = torch.zeros(1, 0, dtype=torch.int64, device=lead.device)
        states = self._passes.read(nothing, self._plan, self._read, lead)
        self._read += lead.shape[1]
        return self._lm.logits(states[:, -1])[0] if self._read == self._lead.shape[1] else None

    @property
    def layers(self) -> list[tuple[Tensor, ...]]:
        """Keys and values [H, keys, D] of each layer, until `Rows` has them."""
        return [tuple(tensor[0] for tensor in layer) for layer in self._cache.held]

    def joined(self) -> None:
        """`Rows` has all keys and values."""
        del self._cache, self._passes, self._lead, self._plan

    @property
    def keys(self) -> int:
        """Keys that are read."""
        return self._first + self._read

    @property
    def position(self) -> Tensor:
        """Of the next token."""
        return self._positions[self._read]

    @property
    def windows(self) -> Sequence[int]:
        """Widths of sliding windows, and 0 for layers without."""
        return list(self._spans)

    def spans(self, width: int) -> Tensor:
        """[S, 2], the keys that the next token sees in layers with a window of `width`, or 0 for none."""
        return self._spans[width][self._read]

    def step(self) -> None:
        """One more token is read."""
        self._read += 1


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [B, H, room, D]; a pass of one token writes each row's at its own place."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.keys, self.values = (tensor.new_zeros(0, len(tensor), 0, tensor.shape[2]) for tensor in (key, value))
        self.places = torch.zeros(0, dtype=torch.int64)
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: there are rows."""

    def move(self, rows: int, room: int, blocks: Room) -> None:
        """Moves to blocks of as many rows and keys; what is beyond them goes."""
        both = blocks(rows, room, self.keys, self.values)
        for block, old in zip(both, (self.keys, self.values), strict=True):
            block[: len(old), :, : old.shape[2]] = old[:rows, :, :room]
        self.keys, self.values = both

    def put(self, row: int, key: Tensor, value: Tensor) -> None:
        """Writes [H, keys, D] at the beginning of a row."""
        self.keys[row, :, : key.shape[1]], self.values[row, :, : value.shape[1]] = key, value

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [B, H, 1, D] and returns the keys and values of these rows."""
        count = len(key_states)
        rows = torch.arange(count, device=key_states.device)
        self.keys[rows, :, self.places] = key_states[:, :, 0]
        self.values[rows, :, self.places] = value_states[:, :, 0]
        return self.keys[:count, :, : self.seen], self.values[:count, :, : self.seen]

    def get_seq_length(self) -> int:
        """A number without meaning: tokens stand where the plan says."""
        return self.seen - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and 0."""
        return self.seen, 0

    def get_max_length(self) -> int:
        """-1, for no limit."""
        return -1


class Rows:
    """The rows that write, in one block of keys and values.

    Args:
        compressor: reads, inside `generation.answering`.
        tokens: that the block has room for, where the rows need no more.
    """

    def __init__(self, compressor: Compressor, tokens: int) -> None:
        self._compressor, self._tokens = compressor, tokens
        self._rows: list[Row] = []
        self._layers: list[_Layer] = []
        # Until a row comes or goes.
        self._bias: list[Tensor] | None = None
        self._packed: PackedLayers | None = None
        # By identity those whose keys and values are held one after another, before the block's. What no row reads any
        # more goes with the next one that comes, or when it is more than half.
        self._memories: dict[int, Memory] = {}
        self._held: PackedLayers | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest(self) -> int:
        """Keys of the longest answer."""
        return max((row.end for row in self._rows), default=0)

    @property
    def packed(self) -> int:
        """Tokens of memories beside those, which rows may share."""
        return _tokens(self._memories | self._read_memories)

    @property
    def _read_memories(self) -> dict[int, Memory]:
        """The packed memories that rows read, by identity."""
        return {id(row.memory): row.memory for row in self._rows if row.memory is not None}

    def join(self, row: Row) -> None:
        """Takes a row whose first token is known."""
        layers = row.layers
        self._layers = self._layers or [_Layer(*layer) for layer in layers]
        self._make_room(len(self) + 1, max(self.longest, row.end))
        for layer, (key, value) in zip(self._layers, layers, strict=True):
            layer.put(len(self), key, value)
        row.joined()
        self._rows.append(row)
        self._bias = self._packed = None

    def _make_room(self, count: int, longest: int) -> None:
        """Has room for as many rows and keys, and for more only within `tokens`."""
        # A failure between two layers leaves them of two shapes.
        for index, layer in enumerate(self._layers):
            rows, _, room, _ = layer.keys.shape
            if count > rows:
                rows = 1 << (count - 1).bit_length()
            if longest > room:
                room = -(-longest // _STEP) * _STEP
            if rows * room > self._tokens:
                rows, room = count, longest
            if (rows, room) != (len(layer.keys), layer.keys.shape[2]):
                layer.move(rows, room, self._blocks(index))

    def _blocks(self, layer: int) -> Room:
        return _alone if self._held is None else partial(self._held.room, layer)

    def leave(self, index: int) -> None:
        """Lets a row go; the last one takes its place."""
        last = len(self) - 1
        if index < last:
            keys = self._rows[last].keys
            for layer in self._layers:
                layer.put(index, layer.keys[last, :, :keys].clone(), layer.values[last, :, :keys].clone())
        self._rows[index] = self._rows[last]
        self._rows.pop()
        self._bias = self._packed = None
        if 2 * _tokens(self._read_memories) < _tokens(self._memories):
            self._hold(None)

    def _hold(self, packed: PackedLayers | None) -> None:
        """Has the block behind these, or by itself."""
        self._held, self._memories = packed, {}
        for index, layer in enumerate(self._layers):
            layer.move(len(layer.keys), layer.keys.shape[2], self._blocks(index))

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Reads the next token of each row; the logits [B, V] of those that follow."""
        compressor, lm, rows = self._compressor, self._compressor.lm, self._rows
        places = torch.tensor([row.keys for row in rows])
        seen = int(places.max()) + 1
        for layer in self._layers:
            layer.places, layer.seen = places.to(lm.device), seen
        plan = Plan(self._spans(0), seen, torch.stack([row.position for row in rows])[:, None])
        plan = plan.with_windows({width: self._spans(width) for width in rows[0].windows if width}).to(lm.device)
        # Models may choose tokens for which they have no embedding.
        ids = torch.tensor(tokens, device=lm.device)[:, None].clamp(0, lm.vocabulary - 1)
        out = lm.run(
            compressor.reader, inputs_embeds=lm.embedded(compressor.reader, ids), plan=plan,
            cache=cast(Any, Cache(layers=[*self._layers])), memory=self._memory(), key_bias=self._biases(),
        )  # fmt: skip
        for row in rows:
            row.step()
        return lm.logits(out.last_hidden_state[:, 0])

    def _spans(self, width: int) -> Tensor:
        """int32 [B, 1, S, 2] of the next tokens."""
        spans = [row.spans(width) for row in self._rows]
        most = max(map(len, spans))
        return torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in spans])[:, None]

    def _memory(self) -> PackedLayers | None:
        """The packed memories of the rows, of which some may be the same; None: there is none."""
        if self._packed is None and (memories := self._read_memories):
            if memories.keys() - self._memories.keys():
                # What is held goes first, and stays away if there is no room.
                self._hold(None)
                self._hold(_together([*memories.values()]))
                self._memories = memories
            held = cast(PackedLayers, self._held)
            first = torch.zeros(sum(held.heads), 1, dtype=torch.int64)
            spans, places = {0: first.expand(1, -1, 2)}, {0: [0][:0]}
            for key, memory in self._memories.items():
                counts, places[key] = memory.counts or (), memory.places[0].tolist()
                spans[key] = spans_of(counts) + first
                sizes = torch.tensor([int(own.sum()) for own in counts])
                first = first + sizes.repeat_interleave(torch.tensor(held.heads))[:, None]
            ids = [0 if row.memory is None else id(row.memory) for row in self._rows]
            # One that all rows read is read once.
            ids = ids if len({*ids}) > 1 else ids[:1]
            seen = padded([places[key] for key in ids], POSITIONS)
            self._packed = held.seen(torch.cat([spans[key] for key in ids]), seen)
        return self._packed

    def _biases(self) -> list[Tensor] | None:
        """For each layer what is added to the logits of keys, [B, H, keys]; None: nothing."""
        if all(row.biases is None for row in self._rows):
            return None
        if self._bias is None:
            self._bias = []
            for index, layer in enumerate(self._layers):
                bias = layer.keys.new_zeros(len(self), layer.keys.shape[1], self.longest, dtype=torch.float32)
                for place, row in enumerate(self._rows):
                    if row.biases is not None:
                        own = row.biases[index]
                        bias[place, :, : own.shape[-1]] = own
                self._bias.append(bias)
        most = max(row.keys for row in self._rows)
        return [bias[..., :most] for bias in self._bias]


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
