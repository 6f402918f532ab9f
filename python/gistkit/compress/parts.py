"""Long contexts are read in parts, each of a length that the method was trained on, whose memories are then joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from gistkit import hf
from gistkit.compress.memory import Memory
from gistkit.compress.memory_join import joined
from gistkit.compress.tokens import Rows, batches, pad, room


def encode_in_parts(compressor: Any, rows: Rows) -> tuple[Memory, Rows]:
    """The memory of contexts, each read in its parts, which are joined; and what was compressed of them."""
    compressed, rest = compressor.cut(rows)
    ends, memories = [compressor.part_ends(row) for row in compressed.lists()], []
    for row, bounds in zip(compressed.lists(), ends, strict=True):
        parts = [row[start:end] for start, end in pairwise([0, *bounds])]
        memory = joined(compressor, compressor.encode_parts(parts))
        memories.append(replace(memory, documents=((len(row),),)))
    memory = Memory.stack(memories)
    return replace(memory, rest=rest or memory.rest), compressed


def encode_parts(compressor: Any, parts: Sequence[Sequence[int]]) -> list[Memory]:
    """The memory of each part, as many parts in a pass as have room."""
    made: dict[int, Memory] = {}
    for batch in batches([*map(len, parts)], room(compressor.device)):
        memory, _ = compressor.encode_rows(pad([parts[index] for index in batch], compressor.device))
        made |= {index: memory[row] for row, index in enumerate(batch)}
    return [made[index] for index in range(len(parts))]


def equal_ends(length: int, reach: int | None, grain: int = 1) -> list[int]:
    """Where parts of at most `reach` tokens end, as few as there can be, of equal sizes and multiples of `grain`."""
    units = -(-length // grain)
    count = 1 if reach is None else -(-units // max(1, reach // grain))
    return [min(length, units * (index + 1) // count * grain) for index in range(count)]


def moves(model: nn.Module) -> bool:
    """Whether the model's keys can be moved, so that parts can be joined."""
    try:
        hf.check_moves(model)
    except TypeError:
        return False
    return True
