"""Documents of a text, and which of them are held out: of Python's documentation, files, or a dataset."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

HELD_OUT = 0.1
SUFFIXES = (".txt", ".md", ".rst")
TRAIN, HELD, TEST = "train", "held_out", "test"
# The title of an article of WikiText, whose rows are lines; titles of its sections have more of these signs.
TITLE = re.compile(r" = [^=\n](?:.*[^=\n])? = \n?")


class Document(NamedTuple):
    """A document, or what is trained on or held out of one: `part` is TRAIN, HELD or TEST, `source` names it.

    `divided` is the rest of a character within which the document was cut: the held-out content begins with it, and as
    text it belongs to the training content.
    """

    part: str
    source: str
    content: bytes
    divided: bytes = b""


class Documents(NamedTuple):
    """A text's name and documents, of which those to hold out come before those to train on; `size` in bytes."""

    name: str
    documents: Iterator[Document]
    size: int | None


# Whether a part has as many tokens as are wanted of it.
Enough = Callable[[str], bool]


def topics() -> Documents:
    """The topics of `pydoc_data`, each cut."""
    from pydoc_data.topics import topics as texts

    documents = [(key, texts[key].encode()) for key in sorted(texts)]
    cut = chain.from_iterable(_cut(key, document) for key, document in documents)
    return Documents("pydoc_data.topics", cut, sum(len(document) for _, document in documents))


def file_documents(path: Path, enough: Enough) -> Documents:
    """A file, cut; or the files of a folder, of which some are held out.

    Raises:
        FileNotFoundError: if there is no such file, or no text file in the folder.
    """
    if not path.exists():
        raise FileNotFoundError(f"text: expected a file or a folder, got {path}, which does not exist")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise FileNotFoundError(f"text: expected {', '.join(SUFFIXES)} files in {path}, got none")
        files = [file for file in files if file.stat().st_size] or files[:1]
    sizes = [file.stat().st_size for file in files]
    return Documents(path.name, _read_files(files, sizes, enough), sum(sizes))


def dataset_documents(name: str, enough: Enough, *, streaming: bool) -> Documents:
    """The documents of a Hugging Face dataset; see `load_corpus` for its splits.

    Raises:
        ImportError: if `datasets` is not installed.
        ValueError: if there is no split "train", or no column "text".
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(f"dataset {name!r} needs the package datasets; pip install datasets brings it") from error
    path, _, configuration = name.partition(":")
    splits = load_dataset(path, configuration or None, streaming=streaming)
    if TRAIN not in splits:
        raise ValueError(f"dataset: expected a split 'train' in {name}, got {', '.join(splits)}")
    columns = splits[TRAIN].column_names
    if columns is not None and "text" not in columns:
        raise ValueError(f"dataset: expected a column 'text' in {name}, got {', '.join(columns)}")
    official = [split for split in ("validation", "test") if split in splits]
    if not official:
        return Documents(name, _hold_out_first(name, splits[TRAIN], enough, streaming=streaming), None)
    return Documents(name, _official(name, splits, official, enough), None)


def _cut(source: str, document: bytes) -> Iterator[Document]:
    """The last tenth of a document, held out, and the rest."""
    cut = end = int(len(document) * (1 - HELD_OUT))
    while end < len(document) and document[end] & 0xC0 == 0x80:
        end += 1
    yield Document(HELD, source, document[cut:], document[cut:end])
    yield Document(TRAIN, source, document[:cut], document[cut:end])


def _read_files(files: Sequence[Path], sizes: Sequence[int], enough: Enough) -> Iterator[Document]:
    if len(files) == 1:
        yield from _cut(str(files[0]), files[0].read_bytes())
        return
    held_out = _tenth(sizes)
    for index in held_out:
        yield Document(HELD, str(files[index]), files[index].read_bytes())
        if enough(HELD):
            break
    for index, file in enumerate(files):
        if index not in held_out:
            yield Document(TRAIN, str(file), file.read_bytes())


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


def _official(name: str, splits: Any, official: Sequence[str], enough: Enough) -> Iterator[Document]:
    for part, split in zip((HELD, TEST), official, strict=False):
        for row, article in _articles(splits[split]):
            yield Document(part, f"{name}, {split}[{row}]", article)
            if enough(part):
                break
    for row, article in _articles(splits[TRAIN]):
        yield Document(TRAIN, f"{name}[{row}]", article)


def _hold_out_first(name: str, rows: Any, enough: Enough, *, streaming: bool) -> Iterator[Document]:
    """The first documents are held out. They are neighbours, because rows near each other may be of one work."""
    articles = _articles(rows)
    first, content = next(articles, (0, b""))
    following = next(articles, None)
    if following is None:
        yield from _cut(f"{name}[{first}]", content)
        return
    while following is not None:
        yield Document(HELD, f"{name}[{first}]", content)
        first, content = following
        if enough(HELD) if streaming else first >= HELD_OUT * len(rows):
            break
        following = next(articles, None)
    for row, article in chain([(first, content)], articles):
        yield Document(TRAIN, f"{name}[{row}]", article)


def _articles(rows: Iterable[dict[str, str]]) -> Iterator[tuple[int, bytes]]:
    """Each article's first row and text: from title to title if the rows begin with one, or else the rows themselves.

    A title is a row between empty ones; rows of formulas may look like titles. Without empty rows, rows are documents.
    """
    lines: list[str] = []
    first = 0
    titled: bool | None = None
    texts = chain((row["text"] for row in rows), [""])
    text = next(texts)
    for index, following in enumerate(texts):
        blank = not text.strip()
        if titled is None and not blank:
            titled = TITLE.fullmatch(text) is not None and not following.strip()
        is_title = not following.strip() and not "".join(lines[-1:]).strip() and TITLE.fullmatch(text)
        if not titled or is_title:
            if "".join(lines).strip():
                yield first, _joined(lines)
            lines, first = [], index
        lines.append(text)
        text = following
    if "".join(lines).strip():
        yield first, _joined(lines)


def _joined(lines: Sequence[str]) -> bytes:
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines).strip("\n").encode()
