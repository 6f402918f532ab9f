"""Store: the memories of many documents in a few files, by name, opened without reading them.

A folder: store.json says what made the memories. Each process that writes has a shard, memory files end to end, and an
index of JSON lines, which says where in the shard each document's memory is. A line is written when its memory is on
the disk, so that a process killed at any point leaves whole memories, and perhaps an end that no line names; `Store`
passes over it, and `StoreWriter` removes it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gistkit.common.checks import check_int
from gistkit.common.files import Appended, Lines, packed_tensors, read_json, unpacked_tensors, write_text
from gistkit.common.messages import one_line, shown
from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Memory
from gistkit.compress.memory_files import packed, unpacked
from gistkit_serve.store.nearest import Embed, Nearest

FORMAT = "gistkit-store"
VERSION = 1
HEADER = "store.json"
SHARD, INDEX = "shard-{:05d}.gists", "shard-{:05d}.jsonl"
CHECKSUM = "checksum"
# Which compressor made a store.
_MAKER = ("source", "fingerprint", "maker")


@dataclass(frozen=True)
class Entry:
    """Where the memory of a document is, and its size.

    Args:
        name: of the document.
        offset, nbytes: of the memory file within the shard.
        tokens: of the document.
        memory_tokens: of the memory.
        text: CRC-32 of the document's text in UTF-8.
        shard: number of the shard; not in the index, whose name has it.
    """

    name: str
    offset: int
    nbytes: int
    tokens: int
    memory_tokens: int
    text: int
    shard: int = 0


class Store(Mapping[str, Memory]):
    """The memories of documents by name; each is read, and its checksum compared, when it is asked for.

    Args:
        folder: what `gistkit compress FOLDER -o STORE` or a `StoreWriter` wrote, or still writes: what the store has
            at this moment is what there is.
        verify: as in `Memory.load`.

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if its header or an index is damaged, or of another version, or a document is there twice.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder, self.verify = Path(folder), verify
        self.header = _read_header(self.folder)
        self.entries = _read_entries(self.folder)
        self._shards: dict[int, mmap.mmap] = {}
        self._indexes: dict[str, Nearest] = {}

    def __getitem__(self, name: str) -> Memory:
        """The memory of one document, on the CPU.

        Raises:
            KeyError: if there is no such document.
            ValueError: if the memory is damaged.
        """
        entry = self.entries[name]
        shard, where = self._shard(entry.shard), f"{self.folder / SHARD.format(entry.shard)}, {name}"
        content = shard[entry.offset : entry.offset + entry.nbytes]
        if len(content) < entry.nbytes:
            raise ValueError(f"{where}: expected a memory of {entry.nbytes} bytes, got {len(content)}")
        header, tensors = unpacked_tensors(where, content, "a memory file", "one that is damaged")
        return unpacked(Memory, where, header, tensors, verify=self.verify)

    def __contains__(self, name: object) -> bool:
        # A mapping's own would read the memory.
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}: {len(self):,} documents)"

    def nearest(self, text: str, k: int = 1, *, embed: Embed | None = None) -> list[tuple[str, float]]:
        """The k documents nearest to a text, such as a question: their names and scores, best first.

        The score of a document is the cosine of its nearest window of 50 words: of tf-idf, 0 to 1, or of the vectors.
        The first call reads the index.

        Args:
            text: some words; by words, a document without any of them is left out.
            k: at least 1; there may be fewer.
            embed: what `index_documents` had made vectors with, or the same model's way with questions; None: by words.

        Raises:
            FileNotFoundError: if the store has no such index; `index_documents` or `gistkit compress --index` adds it.
            ValueError: if the index is damaged, or `embed` gives other vectors than it has.
            ImportError: if scikit-learn, or FAISS for vectors, is not installed.
        """
        return self.index("words" if embed is None else "vectors").nearest(text, check_int("k", k), embed)

    def index(self, kind: str = "words") -> Nearest:
        """The index of "words" or "vectors" as it was at the first call, whose `names` it has; errors as `nearest`."""
        if kind not in self._indexes:
            self._indexes[kind] = Nearest(self.folder, kind)
        return self._indexes[kind]

    def _shard(self, number: int) -> mmap.mmap:
        if number not in self._shards:
            path = self.folder / SHARD.format(number)
            try:
                with path.open("rb") as file:
                    self._shards[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or one_line(error)
                raise ValueError(f"{path}: expected the memories of its index, got {reason}") from error
        return self._shards[number]


class StoreWriter:
    """Adds memories to a store, one that is new or one that the same compressor began; a context manager.

    Args:
        folder: of the store; a new or empty folder, or a store.
        compressor: what makes the memories.
        part: number of this process: each of those that write at a time has its own.

    `entries`: what the store had at the start, by name, from all processes.

    Raises:
        ValueError: if the folder holds something else, another compressor's store, or one that a process of the same
            number is writing to.
        OSError: if it cannot be written.
    """

    def __init__(self, folder: str | Path, compressor: Compressor, *, part: int = 0) -> None:
        self.folder, self.part = Path(folder), part
        fingerprint, maker = compressor.fingerprints()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "source": asdict(compressor.source),
            "fingerprint": fingerprint,
            "maker": maker,
        }
        _begin(self.folder, header)
        self._index = Lines(self.folder / INDEX.format(part))
        try:
            _lock(self._index)
            self.entries = _read_entries(self.folder)
            own = [entry for entry in self.entries.values() if entry.shard == part]
            self._end = max((entry.offset + entry.nbytes for entry in own), default=0)
            self._shard = Appended(self.folder / SHARD.format(part))
            try:
                self._remove_rest()
            except BaseException:
                self._shard.close()
                raise
        except BaseException:
            self._index.close()
            raise

    def add(self, documents: Sequence[tuple[str, str, int]], memories: Memory) -> list[Entry]:
        """Writes the memories of some documents; when it returns they are on the disk.

        Args:
            documents: name, text and number of tokens of each; no name twice.
            memories: a row for each.

        Raises:
            ValueError: if a document is in the store.
            OSError: if the disk is full; what was there before stays.
        """
        added = []
        for row, (name, text, tokens) in enumerate(documents):
            if name in self.entries:
                raise ValueError(f"documents: expected none that is in the store, got {shown(name)}")
            memory = memories[row]
            content = packed_tensors(*packed(memory))
            self._shard.append(content)
            check = zlib.crc32(text.encode())
            entry = Entry(name, self._end, len(content), tokens, memory.sizes[0], check, self.part)
            self._end += len(content)
            self.entries[name] = entry
            added.append(entry)
        # The memories before the lines that name them.
        self._shard.sync()
        for entry in added:
            self._index.write(_line(entry))
        return added

    def close(self) -> None:
        """Waits until the index is on the disk."""
        try:
            self._index.sync()
        finally:
            self._shard.close()
            self._index.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _remove_rest(self) -> None:
        """Removes what a killed process left behind the last memory and the last line that are whole."""
        if self._shard.size < self._end:
            raise ValueError(
                f"{self._shard.path}: expected the {self._end} bytes that its index names, got {self._shard.size}"
            )
        self._shard.cut(self._end)
        self._index.cut(self._index.path.read_bytes().rfind(b"\n") + 1)


def is_store(path: Path) -> bool:
    """Whether there is a store."""
    return (path / HEADER).is_file()


def _begin(folder: Path, header: dict[str, Any]) -> None:
    """Writes the header of a new store, or compares it with that of one which is there."""
    if not is_store(folder):
        # Another process may have made it in between.
        others = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
        if others and not is_store(folder):
            raise ValueError(f"{folder}: expected a store or a new folder, got one with {shown(others[0].name)} in it")
        if not others:
            write_text(folder / HEADER, json.dumps(header, indent=2) + "\n")
    found = _read_header(folder)
    for name in _MAKER:
        if found[name] != header[name]:
            raise ValueError(
                f"{folder}: expected a store of this compressor, got another ({name} differs); use a new folder"
            )


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    header = read_json(path, "the header of a store")
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(
            f"{path}: expected format {FORMAT}, version {VERSION}, got {shown(header.get('format'))}, "
            f"version {shown(header.get('version'))}"
        )
    if missing := sorted({*_MAKER} - header.keys()):
        raise ValueError(f"{path}: expected the header of a store, got none for {missing[0]}")
    return header


def _read_entries(folder: Path) -> dict[str, Entry]:
    """What all indexes say, by the document's name; a line without an end is not there yet."""
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("shard-*.jsonl")):
        if (number := re.fullmatch(r"shard-(\d{5,})", path.stem)) is None:
            continue
        end = 0
        for count, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            entry = _entry(path, count, line, int(number[1]))
            if entry.name in entries:
                raise ValueError(f"{path}, line {count}: expected each document once, got {shown(entry.name)} again")
            if entry.offset != end:
                raise ValueError(f"{path}, line {count}: expected a memory at {end}, got one at {entry.offset}")
            end += entry.nbytes
            entries[entry.name] = entry
    return entries


def _line(entry: Entry) -> str:
    values = asdict(entry)
    del values["shard"]
    return json.dumps(values | {CHECKSUM: _checksum(values)})


def _entry(path: Path, count: int, line: bytes, shard: int) -> Entry:
    """A line of an index."""
    where = f"{path}, line {count}"
    try:
        values = json.loads(line)
        check = values.pop(CHECKSUM, None)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: expected a document as JSON, got {shown(line.decode(errors='replace'))}") from error
    kinds = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Entry) if field.name != "shard"}
    if {name: type(value) for name, value in values.items()} != kinds or check != _checksum(values):
        raise ValueError(f"{where}: expected a document and its checksum, got a line that is damaged")
    return Entry(**values, shard=shard)


def _checksum(values: dict[str, Any]) -> int:
    """The CRC-32 of a line's other values."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _lock(index: Lines) -> None:
    """Holds an index until it is closed, however the process ends."""
    try:
        fcntl.flock(index.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{index.path}: expected one process that writes here, got another one already") from error
    except OSError:
        # Some network disks have no locks.
        return
