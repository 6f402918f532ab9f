"""compress_documents: the memories of many documents, in batches of like lengths, into a store that goes on."""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gistkit.common.checks import at_least, check_int
from gistkit.common.messages import shown
from gistkit.common.text_ids import text_ids
from gistkit.compress.compressor import Compressor
from gistkit.compress.tokens import batches
from gistkit_serve.store.store import Entry, Store, check_names

# Documents of about the same size whose texts are in memory at a time, and sorted by their number of tokens.
WINDOW = 512


@dataclass(frozen=True)
class Document:
    """A document that is read when its turn comes.

    Args:
        name: its name in the store, a relative path such as a/b.txt: parts of at most 250 bytes, of which none is empty
            or begins with a dot. The file of one, a.gist, is no folder of another, as in a.gist/b.
        size: bytes, about as many as its text has.
        read: gives the text.
    """

    name: str
    size: int
    read: Callable[[], str]


def compress_documents(
    compressor: Compressor,
    tokenizer: Any,
    documents: Sequence[Document],
    folder: str | Path,
    *,
    batch_tokens: int = 8192,
    part: int = 0,
    parts: int = 1,
    on_batch: Callable[[Sequence[Entry]], None] | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Compresses the documents that a store does not have yet, and returns their number.

    A process that is killed loses no document of the store, at most the batch that it was at, and the next call goes
    on. With as many parts as before, the memories are then those of one uninterrupted call, to the bit. What the store
    has is read once more, at the speed of the disk, and compared: a text that changed is told, not passed over.

    Args:
        compressor: in eval mode.
        tokenizer: of its model.
        documents: all of them, in any order, in every process the same; none is read twice.
        folder: of the store.
        batch_tokens: most tokens encoded at a time, with padding; a longer document is encoded by itself.
        part, parts: this process and the number of processes; each takes every parts-th document by size.
        on_batch: told what was in the store already and then what each batch added.
        dtype: of the memories in the store; None: as they are made.

    Raises:
        ValueError: if a document is empty, too long for the compressor, or not the text that the store has under its
            name, if a name is none or that of two, if there is no such part, or as `Store.of`.
    """
    batch_tokens = at_least("compress_documents", "batch_tokens", batch_tokens, 1)
    own = share(documents, part, parts)
    check_names([document.name for document in documents])
    count, store = 0, Store.of(folder, compressor)
    stored = dict(store.entries)
    if on_batch is not None:
        on_batch([stored[document.name] for document in own if document.name in stored])
    for start in range(0, len(own), WINDOW):
        window = own[start : start + WINDOW]
        texts = [checked_text(document, stored.get(document.name)) for document in window]
        if all(document.name in stored for document in window):
            continue
        rows = [_row(document, text, compressor, tokenizer) for document, text in zip(window, texts, strict=True)]
        for batch in batches([len(row) for row in rows], batch_tokens):
            # A batch of which the store has a part is encoded whole: other rows would round otherwise.
            missing = [place for place, index in enumerate(batch) if window[index].name not in stored]
            if not missing:
                continue
            with torch.no_grad():
                memory = compressor.encode([rows[index].tolist() for index in batch]).to(dtype=dtype)
            added = []
            for place in missing:
                index = batch[place]
                added.append(store.add(window[index].name, texts[index], len(rows[index]), memory[place]))
            count += len(added)
            if on_batch is not None:
                on_batch(added)
    return count


def share(documents: Sequence[Document], part: int, parts: int) -> list[Document]:
    """Every parts-th document by size, the largest first.

    Raises:
        ValueError: if there is no such part, or two have one name.
    """
    for name, count in Counter(document.name for document in documents).items():
        if count > 1:
            raise ValueError(f"documents: expected names that differ, got {shown(name)} {count} times")
    if check_int("part", part, 0) >= check_int("parts", parts):
        raise ValueError(f"part: expected a number below parts, {parts}, got {part}")
    return sorted(documents, key=lambda document: (-document.size, document.name))[part::parts]


def checked_text(document: Document, entry: Entry | None) -> str:
    """The text of a document, which must be that of its memory where it has one."""
    text = document.read()
    if entry is not None and entry.text != zlib.crc32(text.encode()):
        raise ValueError(
            f"{document.name}: expected the text that the store has under this name, got another; use a new store"
        )
    return text


def _row(document: Document, text: str, compressor: Compressor, tokenizer: Any) -> array[int]:
    """The ids of a document, with an error that names it."""
    row = array("i", text_ids(text, tokenizer))
    try:
        compressor.contexts([row.tolist()])
    except ValueError as error:
        raise ValueError(f"{document.name}: {error}") from error
    return row
