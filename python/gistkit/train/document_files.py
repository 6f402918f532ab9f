"""Documents in files: texts, cut or held out as a whole, and JSON lines, Parquet and WikiText, whose rows are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO

from gistkit.formats import files, parquet
from gistkit.train.documents import (
    HELD,
    HELD_OUT,
    TRAIN,
    Document,
    Documents,
    Enough,
    row_documents,
    text_row,
)

SUFFIXES = (".txt", ".md", ".rst")
JSON_LINES, WIKITEXT = (".jsonl", ".ndjson"), (".raw", ".tokens")
ROWS = (*JSON_LINES, *WIKITEXT, parquet.SUFFIX)
# A file is read in pieces of so many bytes.
PIECE = 1 << 22
# Bytes of text that a compressed byte stands for, at most about.
COMPRESSED = 8
# How the name of a file or of its folder begins, where it is an official split: train/, val.jsonl.zst, wiki.test.raw.
SPLIT = re.compile(r"(?:wiki\.)?(train|validation|valid|val|dev|test)(?![a-z])")
SPLITS = {"valid": "validation", "val": "validation", "dev": "validation"}
# What may stand beside rows and is none of the text.
_ABOUT = re.compile(r"(readme|licen[cs]e|changelog)\b", re.IGNORECASE)


def file_documents(path: Path, enough: Enough, *, streaming: bool = False, split: str | None = None) -> Documents:
    """A file or a folder of texts, of JSON lines or Parquet with a field "text", or of WikiText's files.

    A text is cut, and of a folder of texts some are held out. Of rows the official splits are taken, which names tell
    (`train/`, `val.jsonl.zst`, `wiki.test.raw`), or else the first tenth.

    Args:
        path: the file or folder.
        enough, streaming, split: as in `row_documents`; a file of rows that is named after `split` is held out whole.

    Raises:
        FileNotFoundError: if there is no such file, or none of these in the folder.
        ValueError: if the folder holds both texts and rows.
    """
    if not path.exists():
        raise FileNotFoundError(f"text: expected a file or a folder, got {path}, which does not exist")
    chosen = files_in(path) if path.is_dir() else [path]
    key = _key(path, chosen)
    if files.suffix_of(chosen[0]) in ROWS:
        splits = _splits(path, chosen, split)
        size = sum(file.stat().st_size for file in chosen)
        known, about = (None, size * COMPRESSED) if any(map(_is_compressed, chosen)) else (size, size)
        rows = row_documents(path.name, splits, enough, streaming=streaming, split=split)
        return Documents(path.name, rows, known, about, key)
    if len(chosen) == 1:
        size = _size(chosen[0])
        return Documents(path.name, _cut(chosen[0], size), size, size, key)
    sizes = [file.stat().st_size for file in chosen]
    return Documents(path.name, _read_files(chosen, sizes, enough), sum(sizes), sum(sizes), key)


def _is_compressed(file: Path) -> bool:
    return file.suffix == parquet.SUFFIX or files.is_compressed(file)


def files_in(folder: Path) -> list[Path]:
    every = sorted(file for file in folder.rglob("*") if file.is_file())
    rows = [file for file in every if files.suffix_of(file) in ROWS]
    texts = [file for file in every if file.suffix in SUFFIXES and not (rows and _ABOUT.match(file.name))]
    if rows and texts:
        raise ValueError(f"text: expected texts or rows in {folder}, got both, {texts[0].name} and {rows[0].name}")
    if not rows and not texts:
        kinds = ", ".join(SUFFIXES + ROWS)
        raise FileNotFoundError(f"text: expected {kinds} files in {folder}, got none")
    return rows or [file for file in texts if file.stat().st_size] or texts[:1]


def _key(path: Path, chosen: Sequence[Path]) -> str:
    """The names, sizes and times of all files, as a hash."""
    values = [(str(file.relative_to(path)), *_state(file)) for file in chosen]
    return hashlib.sha256(repr((path.name, values)).encode()).hexdigest()


def _state(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_size, state.st_mtime_ns


class Rows:
    """The rows {"text"} of JSON lines or Parquet, or the lines of WikiText, one at a time, as often as asked for."""

    def __init__(self, chosen: Sequence[Path]) -> None:
        self.files = list(chosen)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for file in self.files:
            if files.suffix_of(file) in WIKITEXT:
                yield from ({"text": line} for _, line in files.lines(file))
            else:
                rows = parquet.rows if file.suffix == parquet.SUFFIX else files.json_lines
                yield from (text_row(where, values) for where, values in rows(file))

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        return sum(map(_rows_of, self.files))


def _rows_of(file: Path) -> int:
    if file.suffix == parquet.SUFFIX:
        return parquet.count(file)
    blank = files.suffix_of(file) in WIKITEXT
    return sum(1 for _, line in files.lines(file) if blank or line.strip())


def _splits(path: Path, chosen: Sequence[Path], split: str | None) -> dict[str, Rows]:
    """The official splits, if the names of all files are those of splits; otherwise all files to train on."""
    found: dict[str, list[Path]] = {}
    for file in chosen:
        matched = SPLIT.match(file.relative_to(path).parts[0] if path.is_dir() else file.name)
        name = matched.group(1) if matched else ""
        found.setdefault(SPLITS.get(name, name), []).append(file)
    if "" in found or not found.keys() & {TRAIN, split}:
        return {TRAIN: Rows(chosen)}
    return {name: Rows(each) for name, each in found.items()}


def _read_files(chosen: Sequence[Path], sizes: Sequence[int], enough: Enough) -> Iterator[Document]:
    held_out = _tenth(sizes)
    for index in held_out:
        yield from _pieces(HELD, chosen[index])
        if enough(HELD):
            break
    for index, file in enumerate(chosen):
        if index not in held_out:
            yield from _pieces(TRAIN, file)


def _tenth(sizes: Sequence[int]) -> list[int]:
    """Indices at even distances, of about a tenth of the whole size: at least one, not all. Sizes are above 0."""
    chosen = []
    missing = 0.0
    for index, size in enumerate(sizes):
        missing += HELD_OUT * size
        if missing >= size / 2:
            chosen.append(index)
            missing -= size
    return chosen or [min(range(len(sizes)), key=lambda index: abs(sizes[index] - missing))]


def _cut(path: Path, size: int) -> Iterator[Document]:
    """The last tenth of a file, held out, and the rest."""
    cut = int(size * (1 - HELD_OUT))
    divided = b""
    for piece in _pieces(HELD, path, cut):
        if not piece.continues:
            length = 0
            while length < len(piece.content) and piece.content[length] & 0xC0 == 0x80:
                length += 1
            divided = piece.content[:length]
            piece = piece._replace(divided=divided)
        yield piece
    before = None
    for piece in _pieces(TRAIN, path, 0, cut):
        if before is not None:
            yield before
        before = piece
    if before is not None:
        yield before._replace(divided=divided)


def _size(path: Path) -> int:
    """The bytes of a file, decompressed."""
    if not files.is_compressed(path):
        return path.stat().st_size
    with files.opened(path) as file:
        return sum(map(len, _blocks(file, None)))


def _pieces(part: str, path: Path, start: int = 0, end: int | None = None) -> Iterator[Document]:
    """The bytes of a file from `start` to `end`; no character is divided between two pieces. At least one piece."""
    with files.opened(path) as file:
        if file.seekable():
            file.seek(start)
        else:
            for _ in _blocks(file, start):
                pass
        rest, continues = b"", False
        for block in _blocks(file, None if end is None else end - start):
            block = rest + block
            whole = len(block) - _begun(block)
            rest, block = block[whole:], block[:whole]
            if block:
                yield Document(part, str(path), block, continues=continues)
                continues = True
        if rest or not continues:
            yield Document(part, str(path), rest, continues=continues)


def _begun(block: bytes) -> int:
    """How many bytes at the end of a block are of a character that may go on behind it."""
    for back in range(1, min(4, len(block)) + 1):
        if block[-back] < 0x80:
            return 0
        if block[-back] >= 0xC0:
            return back
    return 0


def _blocks(file: IO[bytes], size: int | None) -> Iterator[bytes]:
    """The next `size` bytes in blocks; None: all."""
    left = size
    while (block := file.read(PIECE if left is None else min(PIECE, left))) != b"":
        left = None if left is None else left - len(block)
        yield block
