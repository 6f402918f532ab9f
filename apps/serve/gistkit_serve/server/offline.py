"""Offline: memories made elsewhere, of files and stores, which a server answers from and leaves as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Memory
from gistkit_serve.server.entry import Entry, check_own, entry_of
from gistkit_serve.store import Store
from gistkit_serve.store.store import is_store


class Offline:
    """Memories by name: a file's without .gist, and in a store that of the document. Each is read at every use.

    Args:
        paths: memory files of one text, and stores.
        compressor: what made them.

    Raises:
        OSError: if one cannot be read.
        ValueError: if it is damaged or another compressor's, or two have one name.
    """

    def __init__(self, paths: Sequence[Path], compressor: Compressor) -> None:
        self.entries: dict[str, Entry] = {}
        self._compressor, self._prints = compressor, compressor.fingerprints()
        self._read: dict[str, Callable[[], Memory]] = {}
        for path in paths:
            if is_store(path):
                self._add_store(path)
            else:
                name = path.name.removesuffix(".gist")
                entry = entry_of(name, path, self._checked(Memory.load(path, compressor.device)))
                entry.memory = None
                self._add(path, entry, partial(Memory.load, path, compressor.device))

    def get(self, name: str) -> Memory:
        """A memory; a KeyError if there is none, a ValueError or an OSError if it is damaged by now."""
        return self._checked(self._read[name]().to(self._compressor.device))

    def _add_store(self, path: Path) -> None:
        store = Store(path)
        if store.header["maker"] != self._prints[1]:
            raise ValueError(f"{path}: expected a store made by this compressor, got one by another")
        used = int((path / "store.json").stat().st_mtime)
        for name, one in store.entries.items():
            entry = Entry(name, one.tokens, one.memory_tokens, None, one.nbytes, one.nbytes, used)
            self._add(path, entry, partial(store.__getitem__, name))

    def _add(self, path: Path, entry: Entry, read: Callable[[], Memory]) -> None:
        if entry.id in self.entries:
            raise ValueError(f"{path}: expected names that no other store or file has, got {entry.id[:80]!r} again")
        self.entries[entry.id], self._read[entry.id] = entry, read

    def _checked(self, memory: Memory) -> Memory:
        check_own(self._compressor, self._prints, memory)
        return memory
