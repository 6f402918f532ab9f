"""MemoryRepository: memories by id, each in a file, and those that were used last in RAM too."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from gistkit.common.checks import check_int
from gistkit.common.files import lock, private_folder, remove_partials
from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Memory
from gistkit_serve.server.entry import Entry, check_own, entry_of
from gistkit_serve.server.offline import Offline

if TYPE_CHECKING:
    import torch

log = logging.getLogger("gistkit_serve")
SUFFIX = ".gist"
_TEMPORARY = "gistkit-serve-"
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class MemoryRepository:
    """Memories of one row, made by one compressor. Threads may share a repository.

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
        offline: memories made elsewhere, which it has too, and which count towards no limit.

    Raises:
        OSError: if the folder cannot be made, or another repository has it.
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
        offline: Offline | None = None,
    ) -> None:
        self.folder, self._compressor, self._dtype = folder, compressor, dtype
        self._prints = compressor.fingerprints()
        self.offline = offline or Offline((), compressor)
        self.evicted = 0
        """Memories that were removed for the limits' sake."""
        self._most = check_int("most", most)
        self._ram, self._disk = check_int("ram_bytes", ram_bytes, 0), check_int("disk_bytes", disk_bytes)
        self._lock = RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        # Of files that could not be read at the start, for now.
        self._unread: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._held = lock(folder, "server")
        if not os.access(folder, os.W_OK):
            log.warning("%s cannot be written: its memories answer, and none can be added or removed", folder)
        remove_partials(folder)
        self._read_folder()

    def __len__(self) -> int:
        return len(self._entries) + len(self.offline.entries)

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
        entry = entry_of(name, path, memory)
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
            OSError: if its file cannot be read now; it stays. Of one made elsewhere a ValueError too.
        """
        if name in self.offline.entries:
            return self.offline.get(name)
        entry = self._known(name)
        with self._lock:
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
        """What is known of a memory; a KeyError if there is none, an OSError if its file could never be read so far."""
        return self.offline.entries.get(name) or self._known(name)

    def entries(self) -> list[Entry]:
        """All memories, those made elsewhere first, and those used last at the end."""
        with self._lock:
            return [*self.offline.entries.values(), *self._entries.values()]

    def remove(self, name: str) -> None:
        """Removes a memory and its file; a KeyError if there is none, an OSError if its file cannot be removed."""
        entry = self._known(name)
        with self._lock:
            # What cannot be removed is still there.
            self._path(entry.id).unlink(missing_ok=True)
            del self._entries[name]

    def close(self) -> None:
        """Lets another repository have the folder."""
        os.close(self._held)

    def _path(self, name: str) -> Path:
        """The file of a memory: no other text than an id becomes a name."""
        if _ID.fullmatch(name) is None:
            raise KeyError(name)
        return self.folder / f"{name}{SUFFIX}"

    def _known(self, name: str) -> Entry:
        """An entry; what could not be read at the start is read now, while others use the repository."""
        if name in self._unread:
            entry = entry_of(name, self._path(name), self._load(name))
            with self._lock:
                # Another thread may have read it too.
                if name in self._unread:
                    self._unread.remove(name)
                    self._entries[name] = entry
                    self._trim()
        with self._lock:
            return self._entries[name]

    def _load(self, name: str) -> Memory:
        """Reads a memory; a KeyError if it is gone, damaged or another's, an OSError if it cannot be read for now."""
        path = self._path(name)
        try:
            memory = Memory.load(path, self._compressor.device)
            # The file may be another one by now.
            check_own(self._compressor, self._prints, memory)
            return memory
        except (OSError, ValueError, MemoryError) as error:
            # Too many open files are told as a missing one, and too little memory as a file that cannot be read.
            passing = not isinstance(error, ValueError) or isinstance(error.__cause__, RuntimeError)
            if passing and path.exists():
                if isinstance(error, OSError):
                    raise
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
            log.warning("left as it is: %s", error if str(path) in str(error) else f"{path}: {error}")
            with self._lock:
                self._entries.pop(name, None)
                self._unread.discard(name)
            raise KeyError(name) from error

    def _read_folder(self) -> None:
        """Finds the memories of an earlier process, in the order of their use."""
        paths = [path for path in self.folder.glob(f"*{SUFFIX}") if _ID.fullmatch(path.stem)]
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        ram, found = 0, []
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                entry = entry_of(path.stem, path, self._load(path.stem))
            except KeyError:
                continue
            except OSError as error:
                log.warning("%s cannot be read now and is tried again when it is asked for: %s", path, error)
                self._unread.add(path.stem)
                continue
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
                self.evicted += 1
                log.warning(
                    "%s is removed for good, the least recently used: the limits are %d memories and %s bytes of files",
                    name, self._most, f"{self._disk:,}",
                )  # fmt: skip
        return tuple(removed)


def _touch(path: Path) -> None:
    """Notes that a file is used now: a restart knows the order by it."""
    now = time.time_ns()
    # It may have been removed since, or the folder is read-only. (The system's own times are too coarse to tell two
    # uses apart.)
    with suppress(OSError):
        os.utime(path, ns=(now, now))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of memories that ends with the process; those that killed processes have left go now."""
    place = Path(tempfile.gettempdir())
    remove_partials(place, _TEMPORARY)
    with private_folder(place, _TEMPORARY) as path:
        yield path / "memories"
