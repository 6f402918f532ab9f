"""Store: the memories of many documents by name, a folder with a memory file for each and a store.json.

store.json says what made the memories. That of the document a/b.txt is a/b.txt.gist, as `Memory.save` writes it; its
header has the CRC-32 of the text too. A file is whole or not there, so a process killed at any point leaves whole ones.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from gistkit.common.checks import check_int
from gistkit.common.files import read_json, remove_partials, write_tensors, write_text
from gistkit.common.messages import one_line, shown
from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Memory
from gistkit.compress.memory_files import packed
from gistkit_serve.store.nearest import UNKNOWN, Embed, Nearest

FORMAT, VERSION = "gistkit-store", 2
HEADER, SUFFIX = "store.json", ".gist"
# Bytes of a part of a name: file systems allow 255, with the suffix.
LONGEST = 250
# Which compressor made a store.
_MAKER = ("source", "fingerprint", "maker")
# Of a memory's file, beside what every one has.
_DOCUMENT = "document"


@dataclass(frozen=True)
class Entry:
    """What the header of a document's memory file says.

    Args:
        name: of the document.
        tokens: of the document.
        memory_tokens: of the memory.
        text: CRC-32 of the document's text in UTF-8.
        nbytes: of the file.
    """

    name: str
    tokens: int
    memory_tokens: int
    text: int
    nbytes: int


class Store(Mapping[str, Memory]):
    """The memories of documents by name; each is read, and its checksum compared, when it is asked for.

    Args:
        folder: what `gistkit compress FOLDER -o STORE` wrote, or still writes: what it has at this moment is what there
            is.
        verify: as in `Memory.load`.

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if its header is damaged, or of another version.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder, self.verify = Path(folder), verify
        self.header = _read_header(self.folder)
        files = (place / name for place, names in _walk(self.folder) for name in names if name.endswith(SUFFIX))
        paths = (path for path in files if path.is_file() and not path.is_symlink())
        names = {path.relative_to(self.folder).as_posix().removesuffix(SUFFIX): path for path in paths}
        self._paths = {name: names[name] for name in sorted(names)}
        self._indexes: dict[str, Nearest] = {}

    @classmethod
    def of(cls, folder: str | Path, compressor: Compressor) -> Store:
        """The store that a compressor began, or a new one in a new or empty folder.

        Raises:
            ValueError: if the folder holds something else, or another compressor's store.
            OSError: if it cannot be written.
        """
        fingerprint, maker = compressor.fingerprints()
        source = asdict(compressor.source)
        made = {"format": FORMAT, "version": VERSION, "source": source, "fingerprint": fingerprint, "maker": maker}
        _begin(Path(folder), made)
        for place, _ in _walk(Path(folder)):
            remove_partials(place)
        return cls(folder)

    def __getitem__(self, name: str) -> Memory:
        """The memory of one document, on the CPU.

        Raises:
            KeyError: if there is no such document.
            ValueError: if the memory is damaged.
        """
        return Memory.load(self._paths[name], verify=self.verify)

    def __contains__(self, name: object) -> bool:
        # A mapping's own would read the memory.
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}: {len(self):,} documents)"

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """What is known of each document, by name; read from the headers of all files.

        Raises:
            ValueError: if one is damaged.
        """
        return {name: _entry(name, path) for name, path in self._paths.items()}

    def add(self, name: str, text: str, tokens: int, memory: Memory) -> Entry:
        """Writes the memory of a document of `tokens` tokens; when it returns it is on the disk.

        Raises:
            ValueError: if the store has the document, or the name is none of a `Document`.
            OSError: if the disk is full; what was there before stays.
        """
        if name in self:
            raise ValueError(f"name: expected none that is in the store, got {shown(name)}")
        check_names([name])
        path = self.folder / f"{name}{SUFFIX}"
        about = {"tokens": tokens, "memory_tokens": memory.sizes[0], "text": zlib.crc32(text.encode())}
        tensors, header = packed(memory)
        write_tensors(path, tensors, header | {_DOCUMENT: json.dumps(about)})
        self._paths[name] = path
        return self.entries.setdefault(name, _entry(name, path))

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
            ValueError: if the index or the header of a found memory is damaged, or `embed` gives other vectors.
            ImportError: if scikit-learn is needed, for words, and not installed.
        """
        index, most = self.index("words" if embed is None else "vectors"), check_int("k", k)
        found: dict[str, float] = {}
        for name, known, score in index.ranked(text, embed):
            # A document may have gone since, or have been compressed again with another text.
            if self._is_current(name, known):
                found.setdefault(name, score)
            if len(found) == most:
                break
        return [*found.items()]

    def unindexed(self, kind: str = "words") -> list[str]:
        """Documents that an index does not have, or not with the text that they have now; errors as `nearest`."""
        current = set()
        for name, known in self.index(kind).known:
            try:
                is_current = self._is_current(name, known)
            except ValueError:
                # It is damaged, which is told where it is found.
                is_current = True
            if is_current:
                current.add(name)
        return [name for name in self if name not in current]

    def _is_current(self, name: str, known: int) -> bool:
        return name in self and known in (UNKNOWN, _entry(name, self._paths[name]).text)

    def index(self, kind: str = "words") -> Nearest:
        """The index of "words" or "vectors" as it was at the first call, whose `names` it has; errors as `nearest`."""
        if kind not in self._indexes:
            self._indexes[kind] = Nearest(self.folder, kind)
        return self._indexes[kind]


def is_store(path: Path) -> bool:
    """Whether there is a store."""
    return (path / HEADER).is_file()


def check_names(names: Collection[str]) -> None:
    """A ValueError unless documents of these names have a file each; see `Document.name`."""
    folders = {folder for name in names for folder in PurePosixPath(name).parents}
    for name in names:
        if not _is_name(name):
            raise ValueError(
                f"name: expected a relative path without hidden folders, of parts of at most {LONGEST} bytes, got "
                f"{shown(name)}"
            )
        if PurePosixPath(name + SUFFIX) in folders:
            raise ValueError(f"name: expected no document in a folder {shown(name + SUFFIX)}, the file of another")
    if PurePosixPath(HEADER) in folders:
        raise ValueError(f"name: expected no document in a folder {HEADER}, the store's header")


def _is_name(name: str) -> bool:
    path = PurePosixPath(name)
    try:
        # Not os.fsencode: safetensors opens no file of another encoding.
        short = all(len(part.encode()) <= LONGEST for part in path.parts)
    except UnicodeEncodeError:
        return False
    visible = bool(path.parts) and not any(part.startswith(".") for part in path.parts)
    return short and visible and not path.is_absolute() and str(path) == name and "\0" not in name


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
    if (header.get("format"), header.get("version")) == (FORMAT, 1):
        raise ValueError(f"{path}: expected version {VERSION}, got 1 of an earlier gistkit; compress the texts again")
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(
            f"{path}: expected format {FORMAT}, version {VERSION}, got {shown(header.get('format'))}, "
            f"version {shown(header.get('version'))}"
        )
    if missing := sorted({*_MAKER} - header.keys()):
        raise ValueError(f"{path}: expected the header of a store, got none for {missing[0]}")
    return header


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder of a store and its files; what is hidden is being written and may go at any time.

    Raises:
        OSError: if a folder cannot be read, whose documents would be taken for missing ones.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, folders, files in os.walk(folder, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield Path(place), [name for name in files if not name.startswith(".")]


def _entry(name: str, path: Path) -> Entry:
    """What the header of a document's file says."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()[_DOCUMENT])
        tokens, memory_tokens, text = (int(about[key]) for key in ("tokens", "memory_tokens", "text"))
        return Entry(name, tokens, memory_tokens, text, path.stat().st_size)
    except (SafetensorError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: expected the memory of a document, got {one_line(error)}") from error
