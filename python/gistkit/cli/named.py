"""The memory files and texts that `gistkit ask` answers from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.compress import text_memories, warn_of_few
from gistkit.options.texts import is_memory

if TYPE_CHECKING:
    from gistkit.compress import Compressor, Memory

# What to call each memory, and the memories in the order in which they are read.
Named = tuple[list[str], "list[Memory]"]


def other_memories(arguments: argparse.Namespace) -> Named:
    """Those of --with."""
    from gistkit.compress import Memory

    return [str(path) for path in arguments.others], [Memory.load(path) for path in arguments.others]


def is_text(path: Path) -> bool:
    """Whether a file is to be read as a text; a pipe always is, as it can be read only once."""
    if path.suffix == ".gist" or not path.is_file():
        return path.is_fifo()
    with path.open("rb") as file:
        return not is_memory(file.read(9))


def compressed(read: dict[Path, Memory | str], compressor: Compressor, tokenizer: Any) -> dict[Path, Memory]:
    """The memories of files; a text is compressed, and standard error says how to keep its memory."""
    from gistkit.common.text_ids import text_ids

    memories = {}
    for path, content in read.items():
        if not isinstance(content, str):
            memories[path] = content
            continue
        ids = text_ids(content, tokenizer)
        try:
            ((_, _, memory),) = text_memories([ids], compressor, len(ids), leave=False, disable=None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        print(
            f"{path}: {len(ids)} tokens compressed to {memory.sizes[0]} memory tokens ({compressor.title}); "
            "gistkit compress, with the same options, keeps them in a file",
            file=sys.stderr,
        )
        warn_of_few([(str(path), len(ids), memory.sizes[0] + len(memory.rest[0]))], compressor)
        memories[path] = memory
    return memories


def readable(compressor: Compressor, names: list[str], memories: list[Memory]) -> list[Memory]:
    """The memories where the compressor's model is; a ValueError names one that it cannot read."""
    memories = [memory.to(compressor.model.device, compressor.model.dtype) for memory in memories]
    for name, memory in zip(names, memories, strict=True):
        try:
            compressor.check_readable(memory)
        except ValueError as error:
            hint = "; pass that one as --model" if "got one made with the model " in str(error) else ""
            raise ValueError(f"{name}: {str(error).removeprefix('memory: ')}{hint}") from error
    return memories
