"""Shelf: memories by id, each in a file, and those that were used last in RAM too."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from gistkit.common.checks import whole
from gistkit.common.files import remove_partials
from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Memory

if TYPE_CHECKING:
    import torch

log = logging.getLogger("gistkit_serve")
SUFFIX = ".gist"
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass
class Entry:
    """What a shelf knows of a memory.

    Args:
        id: 32 hexadecimal digits, drawn at random.
        tokens: of its text.
        memory_tokens: that stand for them.
        rest: tokens behind the compressor's window, which are read as they are.
        nbytes: of its tensors.
        size: of its file, bytes.
        used: when it was added or last read, seconds since 1970.
        memory: None: it is in its file alone.
        removed: ids of the memories that went when it was added, for the limits' sake.
    """

    id: str
    tokens: int
    memory_tokens: int
    rest: int
    nbytes: int
    size: int
    used: int
    memory: Memory | None = None
    removed: tuple[str, ...] = ()


class Shelf:
    """Memories of one row, made by one compressor. Threads may share a shelf.

    A memory is written to its file when it is added, so that nothing is lost however the process ends. Where the
    memories in RAM pass their limit, those not used for longest stay in their files alone; where the files pass theirs,
    those not used for longest go for good, with a line in the log. Only a name of 32 hexadecimal digits becomes that of
    a file.

    Args:
        folder: of the files, made if there is none. What the compressor cannot read of it stays there untouched, with
            a line in the log.
        compressor: what made the memories and reads them.
        most: memories, in all.
        ram_bytes: of the tensors in RAM. A memory being read has its tensors there too.
        disk_bytes: of the files.
        dtype: of the tensors; None: as they are made.

    Raises:
        OSError: if the folder cannot be written, or another shelf has it.
    """

    def __init__(
        self,
        folder: Path,
        compressor: Compressor,
        *,
        most: int,
        ram_bytes: int,
        disk_bytes: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.folder, self._compressor, self._dtype = folder, compressor, dtype
        self._most = whole("most", most)
        self._ram, self._disk = whole("ram_bytes", ram_bytes, 0), whole("disk_bytes", disk_bytes)
        self._lock = RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        folder.mkdir(parents=True, exist_ok=True)
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._held)
            raise type(error)(f"{folder}: expected a folder of no other server, got one that is in use") from error
        remove_partials(folder)
        self._read_folder()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ram_bytes(self) -> int:
        """Bytes of the memories in RAM."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values() if entry.memory is not None)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def add(self, memory: Memory) -> Entry:
        """Keeps a memory under a new id.

        Raises:
            ValueError: if its file alone passes the limit.
            OSError: if it cannot be written.
        """
        name = secrets.token_hex(16)
        path = self._path(name)
        memory = memory.to(dtype=self._dtype)
        memory.save(path)
        _touch(path)
        entry = _entry(name, path, memory)
        if entry.size > self._disk:
            path.unlink()
            raise ValueError(f"text: expected a memory of at most {self._disk:,} bytes, got {entry.size:,}")
        with self._lock:
            self._entries[name] = entry
            entry.removed = self._trim()
        return entry

    def get(self, name: str) -> Memory:
        """A memory, which counts as used now.

        Raises:
            KeyError: if there is none, or its file is damaged.
        """
        with self._lock:
            entry = self._entries[name]
            self._entries.move_to_end(name)
            memory = entry.memory
            entry.used = int(time.time())
        if memory is None:
            memory = self._load(name)
            with self._lock:
                # It may have been removed since.
                if self._entries.get(name) is entry:
                    entry.memory = memory
                    self._trim()
        _touch(self._path(name))
        return memory

    def entry(self, name: str) -> Entry:
        """What is known of a memory; a KeyError if there is none."""
        with self._lock:
            return self._entries[name]

    def entries(self) -> list[Entry]:
        """All memories, those used last at the end."""
        with self._lock:
            return list(self._entries.values())

    def remove(self, name: str) -> None:
        """Removes a memory and its file; a KeyError if there is none, an OSError if its file cannot be removed."""
        with self._lock:
            entry = self._entries[name]
            # What cannot be removed is still there.
            self._path(entry.id).unlink(missing_ok=True)
            del self._entries[name]

    def close(self) -> None:
        """Lets another shelf have the folder."""
        os.close(self._held)

    def _path(self, name: str) -> Path:
        """The file of a memory: no other text than an id becomes a name."""
        if _ID.fullmatch(name) is None:
            raise KeyError(name)
        return self.folder / f"{name}{SUFFIX}"

    def _load(self, name: str) -> Memory:
        try:
            memory = Memory.load(self._path(name), self._compressor.device)
            # The file may be another one by now.
            check_own(self._compressor, memory)
            return memory
        except (OSError, ValueError) as error:
            log.warning("a memory is lost: %s", error)
            with self._lock:
                self._entries.pop(name, None)
            raise KeyError(name) from error

    def _read_folder(self) -> None:
        """Finds the memories of an earlier process, in the order of their use."""
        files = [path for path in self.folder.glob(f"*{SUFFIX}") if _ID.fullmatch(path.stem) and not path.is_symlink()]
        ram, found = 0, []
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                memory = Memory.load(path, self._compressor.device)
                check_own(self._compressor, memory)
            except (OSError, ValueError) as error:
                log.warning("left as it is: %s", error if str(path) in str(error) else f"{path}: {error}")
                continue
            entry = _entry(path.stem, path, memory)
            ram += entry.nbytes
            if ram > self._ram:
                entry.memory = None
            found.append(entry)
        self._entries.update((entry.id, entry) for entry in reversed(found))
        self._trim()

    def _trim(self) -> tuple[str, ...]:
        """Keeps to the limits and returns the ids of what was removed; the caller has the lock."""
        size, ram, removed = self.disk_bytes, self.ram_bytes, []
        for name, entry in list(self._entries.items()):
            if len(self._entries) <= self._most and size <= self._disk and ram <= self._ram:
                break
            if entry.memory is not None and ram > self._ram:
                ram, entry.memory = ram - entry.nbytes, None
            if len(self._entries) > self._most or size > self._disk:
                size -= entry.size
                try:
                    self.remove(name)
                except OSError as error:
                    log.warning("%s should go, for the limits' sake, and stays: %s", name, error)
                    continue
                removed.append(name)
                log.warning(
                    "%s is removed for good, not used for longest: the limits are %d memories and %s bytes of files",
                    name, self._most, f"{self._disk:,}",
                )  # fmt: skip
        return tuple(removed)


def check_own(compressor: Compressor, memory: Memory) -> None:
    """Refuses a memory that this very compressor has not made of one text."""
    if memory.batch_size != 1:
        raise ValueError(f"memory: expected one of one text, got {memory.batch_size} rows")
    if memory.maker != compressor.own_fingerprint():
        raise ValueError("memory: expected one made by this compressor, got one by another")
    compressor.check_readable(memory)


def _touch(path: Path) -> None:
    """Notes that a file is used now: a restart knows the order by it."""
    now = time.time_ns()
    # It may have been removed since, or the folder is read-only. (The system's own times are too coarse to tell two
    # uses apart.)
    with suppress(OSError):
        os.utime(path, ns=(now, now))


def _entry(name: str, path: Path, memory: Memory) -> Entry:
    rest = len(memory.rest[0])
    tokens = memory.context_lengths[0] + rest
    file = path.stat()
    return Entry(name, tokens, memory.lengths[0], rest, memory.nbytes, file.st_size, int(file.st_mtime), memory)
