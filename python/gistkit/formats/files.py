"""Files of records: JSON lines, JSON documents and CSV, one record at a time; plain, gzip or zstd.

Errors name the file and the line, or the place in the document.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

# What a compressed file begins with, whatever its name is.
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
COMPRESSED = (".gz", ".zst")
CHUNK = 1 << 16
# Bytes of a line and characters of a JSON document's member, decompressed: a few kilobytes of a file may claim more.
MOST = 1 << 28
# Objects and arrays of a record: "{}," takes 24 times its own size.
PARTS = 1 << 22
# An official split, where it stands alone in a name: train-v1.1.json, wiki.valid.raw, PwC_test.jsonl.
_SPLIT = re.compile(r"(?:^|[._-])(train|validation|valid|val|dev|test)(?![a-z])")
_SPLITS = {"valid": "validation", "val": "validation", "dev": "validation"}
_DECODER, _MARK = json.JSONDecoder(), re.compile(r"[^ \t\n\r]")


def suffix_of(path: Path) -> str:
    """The end of a file's name without that of its compression: ".jsonl" of "a.jsonl.zst"."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def split_of(path: Path) -> str:
    """The official split that a path shows, by the first name in it that does ("validation" of "en/dev.csv"), or ""."""
    found = next(filter(None, map(_SPLIT.search, path.parts)), None)
    return _SPLITS.get(found[1], found[1]) if found else ""


def is_compressed(path: Path) -> bool:
    """Whether a file is gzip or zstd, by its first bytes."""
    with path.open("rb") as file:
        return file.read(4).startswith((GZIP, ZSTD))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed; a ValueError names one that is damaged, here or while it is read."""
    with path.open("rb") as raw:
        start = raw.read(4)
        raw.seek(0)
        if start.startswith(GZIP):
            with gzip.open(raw) as file, undamaged(path, "gzip"):
                yield cast(IO[bytes], file)
        elif start == ZSTD:
            try:
                from pyarrow import CompressedInputStream
            except ModuleNotFoundError as error:
                raise ImportError(f"{path}: zstd needs pyarrow; run pip install 'gistkit[zstd]'") from error
            with undamaged(path, "zstd", OSError):
                yield io.BufferedReader(CompressedInputStream(raw, "zstd"), CHUNK)
        else:
            yield raw


@contextmanager
def undamaged(path: Path, name: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises a ValueError that names the file where its data is damaged, for `errors` too."""
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, *errors)
    try:
        yield
    except damage as error:
        # pyarrow raises errors of input and output for it too, without a number.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{path}: expected whole {name} data, got damaged data ({error})") from error


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line with its end) of a file in UTF-8, from 1, without a byte order mark; only "\\n" ends a line."""
    with opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MOST + 1), b""), 1):
            if len(line) > MOST:
                raise ValueError(f"{path}, line {number}: expected a line of at most {MOST} bytes, got a longer one")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: expected UTF-8 text, got byte {line[error.start]:#x} at {error.start}"
                ) from error


def head(path: Path, size: int = 4096) -> str:
    """The first characters of a file, without a byte order mark; what is not UTF-8 is replaced."""
    with opened(path) as file:
        return file.read(size).decode("utf-8-sig", "replace")


def is_array(path: Path) -> bool:
    """Whether a file is a JSON array, and not JSON lines."""
    return head(path).lstrip().startswith("[")


def records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of each JSON line, or of each member of a file that is a JSON array.

    Raises:
        ValueError: naming the file and the line of what is not JSON.
    """
    if is_array(path):
        for index, value in members(path):
            yield f"{path}, [{index}]", value
        return
    yield from json_lines(path)


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of each line that is not empty; errors as in `records`."""
    for number, line in lines(path):
        if line.strip():
            where = f"{path}, line {number}"
            if line.count("{") + line.count("[") > PARTS:
                raise ValueError(f"{where}: expected at most {PARTS} objects and arrays, got more")
            try:
                yield where, json.loads(line)
            # Also of integers with thousands of digits.
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: expected a JSON object, got text that is not JSON: {error}") from error


def members(path: Path, inside: str | None = None) -> Iterator[tuple[str | int, Any]]:
    """(key or index, value) of each member of a JSON document, an object or an array.

    Args:
        path: the file.
        inside: a key of the document whose value is read in its place.

    Raises:
        ValueError: naming the file and the line of what is not JSON, or if `inside` is not there.
    """
    with opened(path) as file:
        document = _Document(path, file)
        yield from document.members(inside)
        if document.mark():
            raise document.error("Extra data")


class _Document:
    """The text of a JSON document, of which no more is held than the member that is read, and a little."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        # `at` is the place in the text, which begins on this line.
        self.text, self.at, self.line, self.ended = "", 0, 1, False

    def error(self, problem: object, line: int | None = None) -> ValueError:
        """For text that is not JSON, of a line of `text`, or at `at`."""
        line = self.text.count("\n", 0, self.at) + 1 if line is None else line
        return ValueError(f"{self.path}, line {self.line + line - 1}: expected JSON, got text that is not: {problem}")

    def more(self) -> None:
        """Reads as much again as is left."""
        self.line += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :], 0
        content = self.file.read(max(CHUNK, len(self.text)))
        self.ended = not content
        try:
            self.text += self.decoder.decode(content, self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n") + error.object.count(b"\n", 0, error.start)
            byte = error.object[error.start]
            raise ValueError(f"{self.path}, line {line}: expected UTF-8 text, got byte {byte:#x}") from error

    def mark(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            found = _MARK.search(self.text, self.at)
            self.at = found.start() if found else len(self.text)
            if found or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def take(self, mark: str) -> None:
        """Goes past the next character, which is this one."""
        if self.mark() != mark:
            raise self.error(f"Expecting {mark!r}")
        self.at += 1

    def value(self) -> Any:
        self.mark()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                # "1" may be the beginning of "1e+2".
                if self.ended or end + 2 < len(self.text):
                    self.at = end
                    return value
            # Also of integers with thousands of digits.
            except (ValueError, RecursionError) as error:
                if self.ended or not isinstance(error, json.JSONDecodeError):
                    raise self.error(error, getattr(error, "lineno", None)) from error
            if len(self.text) - self.at > MOST:
                raise ValueError(f"{self.path}: expected members of at most {MOST} characters, got a longer one")
            if self.text.count("{", self.at) + self.text.count("[", self.at) > PARTS:
                raise ValueError(f"{self.path}: expected members of at most {PARTS} objects and arrays, got more")
            self.more()

    def members(self, inside: str | None = None) -> Iterator[tuple[str | int, Any]]:
        """As the function of this name, of the object or array that comes next."""
        if (mark := self.mark()) not in ("{", "[") or (inside is not None and mark == "["):
            expected = "object or array" if inside is None else f"object with the key {inside!r}"
            raise ValueError(f"{self.path}: expected a JSON {expected}, got {type(self.value()).__name__}")
        self.at += 1
        close, found = "}" if mark == "{" else "]", inside is None
        index, more = 0, self.mark() != close
        while more:
            key = index if close == "]" else self._key()
            if inside is None:
                yield key, self.value()
            elif key == inside:
                found = True
                yield from self.members()
            else:
                self.value()
            index, more = index + 1, self.mark() == ","
            self.at += more
        self.take(close)
        if not found:
            raise ValueError(f"{self.path}: expected the key {inside!r}, got a document without it")

    def _key(self) -> str:
        if self.mark() != '"':
            raise self.error("Expecting property name enclosed in double quotes")
        key = str(self.value())
        self.take(":")
        return key


def rows(path: Path, delimiter: str = ",") -> Iterator[tuple[str, dict[str, str]]]:
    """(where it stands, {column: cell}) of each row of a CSV file with a header; a row may have several lines.

    "\\r" also ends a line, as in old files of spreadsheets.
    """
    csv.field_size_limit(min(MOST, 2**31 - 1))
    parts = (part for _, line in lines(path) for part in re.split(r"(?<=\r)(?!\n)", line) if part)
    reader = csv.reader(parts, delimiter=delimiter)
    try:
        columns = next(reader, [])
        start = reader.line_num
        for cells in reader:
            where, start = f"{path}, line {start + 1}", reader.line_num
            if cells and len(cells) != len(columns):
                raise ValueError(f"{where}: expected {len(columns)} cells as in the header, got {len(cells)}")
            if cells:
                yield where, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: expected cells of CSV, got others: {error}") from error
