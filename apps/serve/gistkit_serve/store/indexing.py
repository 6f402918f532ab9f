"""index_documents: adds documents of a store to its index, by which `Store.nearest` finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from gistkit_serve.store.documents import Document, checked_text, share
from gistkit_serve.store.nearest import (
    UNKNOWN,
    Embed,
    check_embed,
    index_files,
    read_file,
    vector_tensors,
    windows,
    word_tensors,
    write_file,
)
from gistkit_serve.store.store import Store

# Most documents, and about as many bytes of text, in a file of the index.
DOCUMENTS, BYTES = 512, 8_000_000


def index_documents(
    folder: str | Path,
    documents: Sequence[Document],
    *,
    embed: Embed | None = None,
    part: int = 0,
    parts: int = 1,
    on_file: Callable[[int], None] | None = None,
) -> int:
    """Adds the documents that the index of a store does not have yet, and returns their number.

    Files of some hundred documents are written whole or not at all, and a later call goes on. The index of words needs
    scikit-learn alone; it knows words by their letters and suits languages that write them apart. Its files take about
    half as much as the texts.

    Args:
        folder: of a store that has all documents of this part, see `compress_documents`.
        documents: as in `compress_documents`; those that the index has are not read.
        embed: makes the vectors [N, D] of a list of N texts, such as the `encode` of a model of sentence-transformers,
            for an index of vectors beside that of words; None: the index of words. Always the same for a store, which
            is checked by a text whose vector the index keeps.
        part, parts: this process and the number of processes.
        on_file: told what was in the index already and then what each file added, numbers of documents.

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if the store does not have a document, or another text of its name, if a file of the index is
            damaged, or `embed` gives something else or is not what made the vectors that are there.
        ImportError: if scikit-learn is needed and not installed.
    """
    folder, kind = Path(folder), "words" if embed is None else "vectors"
    entries = Store(folder).entries
    files = [read_file(path, kind) for path in index_files(folder, kind)]
    # By the texts that the store has now.
    known = {n for file in files for n, text in file.known if n in entries and text in (UNKNOWN, entries[n].text)}
    if embed is not None:
        check_embed(embed, [file.probe for file in files], folder)
    del files
    own = share(documents, part, parts)
    missing = [document for document in own if document.name not in known]
    if on_file is not None:
        on_file(len(own) - len(missing))
    for group in _groups(missing):
        texts, places = [], []
        for place, document in enumerate(group):
            if document.name not in entries:
                raise ValueError(f"{document.name}: expected a document of the store {folder}, got none of this name")
            new = windows(checked_text(document, entries[document.name]))
            texts += new
            places += [place] * len(new)
        tensors = word_tensors(texts) if embed is None else vector_tensors(texts, embed)
        names = {document.name: entries[document.name].text for document in group}
        write_file(folder, kind, names, torch.tensor(places, dtype=torch.int32), tensors)
        if on_file is not None:
            on_file(len(group))
    return len(missing)


def _groups(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """The documents of each file."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += document.size
        if len(group) == DOCUMENTS or size >= BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
