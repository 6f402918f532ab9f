"""The memory files that `gistkit ask` answers from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gistkit.compress import Compressor, Memory

# What to call each memory, and the memories in the order in which they are read.
Named = tuple[list[str], "list[Memory]"]


def named_memories(arguments: argparse.Namespace) -> Named:
    """MEMORY, and then --with.

    Raises:
        ValueError, OSError: if one is not there or damaged.
    """
    from gistkit.compress import Memory

    names, memories = other_memories(arguments)
    return [str(arguments.memory), *names], [Memory.load(arguments.memory), *memories]


def other_memories(arguments: argparse.Namespace) -> Named:
    """Those of --with."""
    from gistkit.compress import Memory

    return [str(path) for path in arguments.others], [Memory.load(path) for path in arguments.others]


def readable(compressor: Compressor, names: list[str], memories: list[Memory]) -> list[Memory]:
    """The memories where the compressor's model is; a ValueError names one that it cannot read."""
    memories = [memory.to(compressor.model.device, compressor.model.dtype) for memory in memories]
    for name, memory in zip(names, memories, strict=True):
        try:
            compressor.check_readable(memory)
        except ValueError as error:
            raise ValueError(f"{name}: {str(error).removeprefix('memory: ')}") from error
    return memories
