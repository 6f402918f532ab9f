"""Documents of a text, and which of them are held out: of Python's documentation, rows, or of `datasets`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any, NamedTuple

from gistkit.formats import hub

HELD_OUT = 0.1
TRAIN, HELD, TEST = "train", "held_out", "test"
# Bytes of a document that are read at a time.
BLOCK = 1 << 22
# The title of an article of WikiText, whose rows are lines; titles of its sections have more of these signs.
TITLE = re.compile(r" = [^=\n](?:.*[^=\n])? = \n?")


class Document(NamedTuple):
    """A document, or what is trained on or held out of one: the bytes from `start` to `end` of its content.

    `part` is TRAIN, HELD or TEST, and `source` names it. As text, a character that is divided by such a place is all
    before it.
    """

    part: str
    source: str
    content: bytes | memoryview
    start: int = 0
    end: int | None = None

    def blocks(self) -> Iterator[tuple[bytes | memoryview, bytes]]:
        """The bytes in blocks, each as it is and as text."""
        end = len(self.content) if self.end is None else self.end
        for low in range(self.start, end, BLOCK):
            high = min(low + BLOCK, end)
            yield self.content[low:high], bytes(self.content[self._whole(low) : self._whole(high)])
            if isinstance(mapped := getattr(self.content, "obj", None), mmap):
                # What was read of a file would count as the process's memory as long as there is enough of it.
                mapped.madvise(MADV_DONTNEED)

    def _whole(self, at: int) -> int:
        """The first place from there on that divides no character."""
        while 0 < at < len(self.content) and self.content[at] & 0xC0 == 0x80:
            at += 1
        return at


class Documents(NamedTuple):
    """A text's name and documents, of which those to hold out come before those to train on.

    `size` is in bytes; None if it is not known. `key` is equal only for equal texts, and known before they are read;
    None: nothing is.
    """

    name: str
    documents: Iterator[Document]
    size: int | None
    key: str | None = None


# Whether a part has as many tokens as are wanted of it; None: all are wanted.
Enough = Callable[[str], bool] | None
# Such as a split of `datasets`: rows that can be read more than once.
Table = Iterable[Mapping[str, Any]]


def topics(split: str | None = None) -> Documents:
    """The topics of `pydoc_data`, each cut; they have no `split`."""
    from pydoc_data.topics import topics as texts

    name = "pydoc_data.topics"
    official_splits(name, (), split)
    documents = [(key, texts[key].encode()) for key in sorted(texts)]
    parts = chain.from_iterable(cut(key, document) for key, document in documents)
    return Documents(name, parts, sum(len(document) for _, document in documents))


def dataset_documents(
    dataset: str | Table | Mapping[str, Table], enough: Enough, split: str | None = None
) -> Documents:
    """The documents of a Hugging Face dataset, by its name or as an object; see `load_corpus` for its splits."""
    name = name_of(dataset)
    if isinstance(dataset, str):
        splits = hub.load(dataset, streaming=enough is not None)
    else:
        splits = dataset if isinstance(dataset, Mapping) else {TRAIN: dataset}
    if TRAIN not in splits:
        raise ValueError(f"dataset: expected a split 'train' in {name}, got {', '.join(splits)}")
    tables = {part: table_rows(name if part == TRAIN else f"{name}, {part}", rows) for part, rows in splits.items()}
    return Documents(name, row_documents(name, tables, enough, split), None)


def name_of(source: object) -> str:
    """What data are called in messages: by their name, or their kind."""
    return str(source) if isinstance(source, str | Path) else type(source).__name__


class Rows:
    """The rows {"text"} of a text, as often as asked for.

    `read` gives (where it stands, row) of each, and `count` their number; None: they are read once more.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, object]]], count: Callable[[], int] | None) -> None:
        self._read, self._count = read, count

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (text_row(where, values) for where, values in self._read())

    def __len__(self) -> int:
        return sum(1 for _ in self._read()) if self._count is None else self._count()


def table_rows(name: str, rows: Any) -> Rows:
    """The rows of a table, such as a `datasets.Dataset` or `IterableDataset`; `name` stands in messages."""
    columns = getattr(rows, "column_names", None)
    if columns is not None and "text" not in columns:
        raise ValueError(f"dataset: expected a column 'text' in {name}, got {', '.join(columns)}")
    if not isinstance(rows, Iterable) or isinstance(rows, Iterator | str | bytes):
        raise ValueError(f"dataset: expected rows that can be read more than once, got {type(rows).__name__}")
    count = partial(len, rows) if isinstance(rows, Sized) else None
    return Rows(lambda: ((f"{name}[{index}]", values) for index, values in enumerate(rows)), count)


def text_row(where: str, values: object) -> dict[str, str]:
    """The row {"text"} of an object that has a text; `where` it stands."""
    text = values.get("text") if isinstance(values, Mapping) else None
    if not isinstance(text, str):
        got = repr(text) if isinstance(values, Mapping) else type(values).__name__
        raise ValueError(f"{where}, 'text': expected an object with a text, got {got:.60}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}, 'text': expected whole characters, got {text[error.start]!r}") from error
    return {"text": text}


def row_documents(name: str, splits: Mapping[str, Any], enough: Enough, split: str | None = None) -> Iterator[Document]:
    """The documents of rows {"text"}: held out are the splits "validation" and "test", or the first of the others.

    Args:
        name: of the text.
        splits: rows by "train", "validation" and "test"; only the first has to be there, or else `split`.
        enough: see `Enough`; with it the number of rows is not asked for, and it says how many are held out.
        split: the one that is held out, where rows have splits; None: both.
    """
    if official := official_splits(name, splits, split):

        def sourced(part: str) -> Iterator[tuple[str, bytes]]:
            source = name if part == TRAIN else f"{name}, {part}"
            return ((f"{source}[{row}]", article) for row, article in articles(splits.get(part, ())))

        return split_documents({part: sourced(part) for part in (TRAIN, *official)}, official, enough)
    return _hold_out_first(name, splits[TRAIN], enough)


def official_splits(name: str, splits: Iterable[str], split: str | None) -> list[str]:
    """Those of a text's splits that are held out, and only `split` where one is asked for."""
    official = [each for each in ("validation", "test") if each in splits]
    if split is not None and split not in official:
        expected = f"{' or '.join(official)}, which {name} has" if official else f"none of {name}, which has no splits"
        raise ValueError(f"split: expected {expected}, got {split}")
    return official if split is None else [split]


def cut(source: str, content: bytes | memoryview) -> Iterator[Document]:
    """The last tenth of a document, held out, and the rest."""
    at = int(len(content) * (1 - HELD_OUT))
    yield Document(HELD, source, content, at)
    yield Document(TRAIN, source, content, 0, at)


def split_documents(
    splits: Mapping[str, Iterable[tuple[str, bytes | memoryview]]], official: Sequence[str], enough: Enough
) -> Iterator[Document]:
    """The documents (source, content) of splits, the `official` ones held out."""
    for part, split in zip((HELD, TEST), official, strict=False):
        for source, content in splits[split]:
            yield Document(part, source, content)
            if enough is not None and enough(part):
                break
    for source, content in splits.get(TRAIN, ()):
        yield Document(TRAIN, source, content)


def _hold_out_first(name: str, rows: Any, enough: Enough) -> Iterator[Document]:
    """The first documents are held out. They are neighbours, because rows near each other may be of one work."""
    found = articles(rows)
    first, content = next(found, (0, b""))
    following = next(found, None)
    if following is None:
        yield from cut(f"{name}[{first}]", content)
        return
    tenth = 0 if enough is not None else HELD_OUT * len(rows)
    while following is not None:
        yield Document(HELD, f"{name}[{first}]", content)
        first, content = following
        if first >= tenth if enough is None else enough(HELD):
            break
        following = next(found, None)
    for row, article in chain([(first, content)], found):
        yield Document(TRAIN, f"{name}[{row}]", article)


def articles(rows: Iterable[dict[str, str]]) -> Iterator[tuple[int, bytes]]:
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


def _joined(lines: list[str]) -> bytes:
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines).strip("\n").encode()
