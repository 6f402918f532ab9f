"""Documents in files: texts, cut or held out as a whole, and JSON lines, Parquet and WikiText, whose rows are."""

from __future__ import annotations

import re
import shutil
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from mmap import ACCESS_READ, mmap
from os import SEEK_END
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from gistkit.formats import files, parquet
from gistkit.train.documents import (
    HELD,
    HELD_OUT,
    TRAIN,
    Documents,
    Enough,
    Rows,
    cut,
    official_splits,
    row_documents,
    split_documents,
)

SUFFIXES = (".txt", ".md", ".rst")
JSON_LINES, WIKITEXT = (".jsonl", ".ndjson"), (".raw", ".tokens")
# C4's JSON lines, or a JSON array; beside other files it may be about them.
JSON = ".json"
ROWS = (*JSON_LINES, *WIKITEXT, parquet.SUFFIX, JSON)
# What may stand beside rows and official splits and is none of the text.
_ABOUT = re.compile(r"(readme|licen[cs]e|changelog)\b", re.IGNORECASE)


def file_documents(path: Path, enough: Enough = None, split: str | None = None) -> Documents:
    """A file or a folder of texts, of JSON lines or Parquet with a field "text", or of WikiText's files.

    Held out are the official splits that names show (`train/`, `val.jsonl.zst`, `wiki.test.raw`). Without these a text
    is cut, and of a folder of texts some are held out; of rows the first tenth is.

    Args:
        path: the file or folder.
        enough, split: as in `row_documents`; a file that is named after `split` is held out whole.
    """
    if not path.exists():
        raise FileNotFoundError(f"text: expected a file or a folder, got {path}, which does not exist")
    chosen = files_in(path) if path.is_dir() else [path]
    states = [(str(file.relative_to(path)), file.stat()) for file in chosen]
    key = repr((path.name, [(name, state.st_size, state.st_mtime_ns) for name, state in states]))
    packed = any(file.suffix == parquet.SUFFIX or files.is_compressed(file) for file in chosen)
    size = None if packed else sum(state.st_size for _, state in states)
    splits = _splits(path, chosen, split)
    if files.suffix_of(chosen[0]) in ROWS:
        rows = {name: file_rows(each) for name, each in splits.items()}
        documents = row_documents(path.name, rows, enough, split)
    elif not (official := official_splits(path.name, splits, split)) and len(chosen) == 1:
        content = _mapped(chosen[0])
        documents, size = cut(str(chosen[0]), content), len(content)
    else:
        if not official:
            held_out = {chosen[index] for index in _tenth([state.st_size for _, state in states])}
            splits = {HELD: sorted(held_out), TRAIN: [file for file in chosen if file not in held_out]}
        texts = {name: ((str(file), _mapped(file)) for file in each) for name, each in splits.items()}
        documents = split_documents(texts, official or [HELD], enough)
    return Documents(path.name, documents, size, key)


def files_in(folder: Path) -> list[Path]:
    every = sorted(file for file in folder.rglob("*") if file.is_file())
    rows = [file for file in every if files.suffix_of(file) in ROWS and files.suffix_of(file) != JSON]
    texts = [file for file in every if files.suffix_of(file) in SUFFIXES and not (rows and _ABOUT.match(file.name))]
    if rows and texts:
        raise ValueError(f"text: expected texts or rows in {folder}, got both, {texts[0].name} and {rows[0].name}")
    rows = rows or ([] if texts else [file for file in every if files.suffix_of(file) == JSON])
    if not rows and not texts:
        kinds = ", ".join(SUFFIXES + ROWS)
        raise FileNotFoundError(f"text: expected {kinds} files in {folder}, got none")
    return rows or [file for file in texts if file.stat().st_size] or texts[:1]


def file_rows(chosen: Sequence[Path]) -> Rows:
    """The rows of JSON lines or Parquet, or the lines of WikiText."""
    return Rows(lambda: chain.from_iterable(map(_rows, chosen)), lambda: sum(map(_rows_of, chosen)))


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    if files.suffix_of(file) in WIKITEXT:
        return ((str(file), {"text": line}) for _, line in files.lines(file))
    return parquet.rows(file) if file.suffix == parquet.SUFFIX else files.records(file)


def _rows_of(file: Path) -> int:
    if file.suffix == parquet.SUFFIX:
        return parquet.count(file)
    blank = files.suffix_of(file) in WIKITEXT
    if not blank and files.is_array(file):
        return sum(1 for _ in files.members(file))
    return sum(1 for _, line in files.lines(file) if blank or line.strip())


def _splits(path: Path, chosen: Sequence[Path], split: str | None) -> dict[str, list[Path]]:
    """The official splits, if the names of all files are those of splits; otherwise all files to train on."""
    found: dict[str, list[Path]] = {}
    for file in chosen:
        found.setdefault(files.split_of(file.relative_to(path) if path.is_dir() else Path(file.name)), []).append(file)
    if all(_ABOUT.match(file.name) for file in found.get("", ())) and len(found) > 1:
        found.pop("", None)
    if "" in found or not found.keys() & {TRAIN, split}:
        return {TRAIN: list(chosen)}
    return found


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


def _mapped(path: Path) -> bytes | memoryview:
    """The bytes of a file, read when they are asked for; those of a compressed one are a file without a name."""
    with ExitStack() as stack:
        file = stack.enter_context(files.opened(path))
        if files.is_compressed(path):
            compressed, file = file, stack.enter_context(TemporaryFile())
            shutil.copyfileobj(compressed, file)
        size = file.seek(0, SEEK_END)
        content = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)) if size else b""
        # Some editors begin a file with a byte order mark.
        return content[len(BOM_UTF8) :] if content[: len(BOM_UTF8)] == BOM_UTF8 else content
