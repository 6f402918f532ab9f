"""Entry: what a server knows of a memory without having read it, and which memories are its compressor's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Memory


@dataclass
class Entry:
    """What a repository knows of a memory.

    Args:
        id: 32 hexadecimal digits, drawn at random; of one made elsewhere a name.
        tokens: of its text.
        memory_tokens: that stand for them.
        rest: tokens behind the compressor's window, which are read as they are; None: not known before it is read.
        nbytes: of its tensors.
        size: of its file, bytes.
        used: when it was added or last read, seconds since 1970.
        memory: None: it is in its file alone.
        removed: ids of the memories that went when it was added, for the limits' sake.
    """

    id: str
    tokens: int
    memory_tokens: int
    rest: int | None
    nbytes: int
    size: int
    used: int
    memory: Memory | None = None
    removed: tuple[str, ...] = ()


def check_own(compressor: Compressor, prints: tuple[str, str], memory: Memory) -> None:
    """Refuses a memory that this very compressor has not made of one text.

    Args:
        prints: the compressor's `fingerprints`, which take milliseconds to look at: a folder has thousands of memories.
    """
    if memory.batch_size != 1:
        raise ValueError(f"memory: expected one of one text, got {memory.batch_size} rows")
    if (memory.fingerprint, memory.maker) != prints:
        raise ValueError("memory: expected one made by this compressor, got one by another")
    compressor.check_readable(replace(memory, fingerprint=None, maker=None))


def entry_of(name: str, path: Path, memory: Memory) -> Entry:
    rest = len(memory.rest[0])
    tokens = memory.context_lengths[0] + rest
    file = path.stat()
    return Entry(name, tokens, memory.sizes[0], rest, memory.nbytes, file.st_size, int(file.st_mtime), memory)
