"""Corpus: text as streams of token ids, by default the standard library's documentation, or files, or a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

HELD_OUT = 0.1
SUFFIXES = (".txt", ".md", ".rst")
# Documents are joined by an empty line.
SEPARATOR = b"\n\n"
# Texts are tokenised in pieces of so many characters, for visible progress and bounded memory.
PIECE = 1 << 19


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out token ids, a stream each; the last tenth of every document is held out.

    Args:
        name: where the text comes from.
        train: [n] token ids, uint8 for bytes, otherwise int32.
        held_out: the same.
        digest: first 12 hexadecimal digits of the SHA-256 of the text, to tell texts apart.
        tokenizer: the tokenizer of the ids; None if they are bytes.
    """

    name: str
    train: Tensor
    held_out: Tensor
    digest: str
    tokenizer: Any = None

    @property
    def unit(self) -> str:
        """The name of an id in messages."""
        return "bytes" if self.tokenizer is None else "tokens"

    def text(self, ids: Tensor) -> str:
        """The text of a row of ids; the tokenizer must decode."""
        if self.tokenizer is None:
            return bytes(ids.tolist()).decode("utf-8", "replace")
        return self.tokenizer.decode(ids.tolist())

    def passages(self, starts: Tensor | np.ndarray, length: int) -> Tensor:
        """The training passages that begin at `starts` [B], int64 [B, length]."""
        return self.train[torch.as_tensor(starts)[:, None] + torch.arange(length)].long()

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """`rows` random training passages, int64 [rows, length]."""
        return self.passages(torch.randint(0, self.train.numel() - length + 1, (rows,), generator=generator), length)

    def chunks(self, length: int, *, stride: int | None = None, count: int | None = None) -> Tensor:
        """Held-out passages in a fixed shuffled order, int64 [n, length].

        Args:
            length: ids in each.
            stride: ids from the start of one to the start of the next; None: `length`, so that they do not overlap.
            count: at most so many; None: all.
        """
        if self.held_out.numel() < length:
            return torch.empty(0, length, dtype=torch.int64)
        passages = self.held_out.unfold(0, length, stride or length)
        order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(7))
        return passages[order[:count]].long()

    def check(self, length: int) -> None:
        """Refuses a text in which either part is shorter than `length`."""
        if min(self.train.numel(), self.held_out.numel()) < length:
            raise ValueError(
                f"text: expected at least {length} {self.unit} in the held-out tenth of {self.name}, "
                f"got {self.held_out.numel()} (and {self.train.numel()} to train on)"
            )


def load_corpus(
    text: str | Path | None = None,
    *,
    dataset: str | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
    progress: bool = False,
) -> Corpus:
    """Reads and tokenises a text.

    Args:
        text: a file, or a folder whose .txt, .md and .rst files are documents. With neither it nor `dataset`, the
            documents are those of `pydoc_data.topics`, 460 KB of English that comes with Python.
        dataset: name of a Hugging Face dataset, "owner/name" or "owner/name:configuration", whose split "train" has a
            column "text"; a document a row. Needs the package `datasets`.
        tokenizer: a transformers tokenizer, or a function of a string that returns token ids; None: UTF-8 bytes.
        limit: training ids to keep; reading stops soon after them, and a dataset is streamed. None: all.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError: if there is no such file, or no text file in the folder.
        ImportError: if `datasets` is needed and not installed.
        ValueError: if the text is not UTF-8 (with a tokenizer), or both `text` and `dataset` are given.
    """
    if text is not None and dataset is not None:
        raise ValueError(f"dataset: expected none beside a text, got {dataset!r} and {str(text)!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1, got {limit}")
    if dataset is not None:
        name, documents, size = _dataset(dataset, streaming=limit is not None)
    else:
        name, documents, size = _topics() if text is None else _files(Path(text))
    train, held_out = _IdStream(tokenizer), _IdStream(tokenizer)
    digest, held_out_parts = hashlib.sha256(), [b"\0"]
    with tqdm(total=size, desc=f"reading {name}", unit="B", unit_scale=True, disable=not progress) as bar:
        for index, (source, document) in enumerate(documents):
            separator = SEPARATOR if index else b""
            cut = int(len(document) * (1 - HELD_OUT))
            digest.update(separator + document[:cut])
            held_out_parts.append(separator + document[cut:])
            while tokenizer is not None and cut < len(document) and document[cut] & 0xC0 == 0x80:
                cut += 1  # not inside a character
            train.add(source, separator + document[:cut])
            held_out.add(source, separator + document[cut:])
            bar.update(len(document))
            if limit is not None and train.count >= limit:
                break
    digest.update(b"".join(held_out_parts))
    train_ids, held_out_ids = train.finish()[:limit], held_out.finish()
    ids = torch.from_numpy(train_ids), torch.from_numpy(held_out_ids)
    return Corpus(name, *ids, digest.hexdigest()[:12], tokenizer)


def token_ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """The ids of `text`; `tokenizer` is as in `load_corpus`, `special` whether it may add start and end tokens."""
    if tokenizer is None:
        return list(text.encode())
    # verbose: a transformers tokenizer warns of texts that are too long for its model.
    options = {"add_special_tokens": special, "verbose": False} if hasattr(tokenizer, "add_special_tokens") else {}
    output = tokenizer(text, **options)
    output = output["input_ids"] if hasattr(output, "keys") else output
    ids = np.asarray(output)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(
            f"tokenizer: expected a list of integers for a string, got {type(output).__name__} with shape {ids.shape}"
        )
    return ids.astype(np.int64).tolist()


class _IdStream:
    """Ids of texts one after another."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.count = 0
        self._ids: list[np.ndarray] = []
        self._pending = ""

    def add(self, source: str, part: bytes) -> None:
        """Appends a part of the document `source`."""
        if self.tokenizer is None:
            self._append(np.frombuffer(bytearray(part), np.uint8))
            return
        try:
            text = self._pending + part.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{source}: expected UTF-8 text, got byte {part[error.start]:#x} in it") from error
        start = 0
        while len(text) - start > PIECE:
            # At the end of a line, where there is one.
            end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
            self._encode(text[start:end])
            start = end
        self._pending = text[start:]

    def finish(self) -> np.ndarray:
        """All ids."""
        if self._pending:
            self._encode(self._pending)
        return np.concatenate(self._ids) if self._ids else np.empty(0, np.uint8)

    def _encode(self, text: str) -> None:
        self._append(np.array(token_ids(self.tokenizer, text), np.int32))

    def _append(self, ids: np.ndarray) -> None:
        self._ids.append(ids)
        self.count += len(ids)


def _topics() -> tuple[str, Iterator[tuple[str, bytes]], int]:
    from pydoc_data.topics import topics

    documents = [(key, topics[key].encode()) for key in sorted(topics)]
    return "pydoc_data.topics", iter(documents), sum(len(document) for _, document in documents)


def _files(path: Path) -> tuple[str, Iterator[tuple[str, bytes]], int]:
    if not path.exists():
        raise FileNotFoundError(f"text: expected a file or a folder, got {path}, which does not exist")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise FileNotFoundError(f"text: expected {', '.join(SUFFIXES)} files in {path}, got none")
    size = sum(file.stat().st_size for file in files)
    return path.name, ((str(file), file.read_bytes()) for file in files), size


def _dataset(name: str, *, streaming: bool) -> tuple[str, Iterator[tuple[str, bytes]], None]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(f"dataset {name!r} needs the package datasets; pip install datasets brings it") from error
    path, _, configuration = name.partition(":")
    rows = load_dataset(path, configuration or None, split="train", streaming=streaming)
    if rows.column_names is not None and "text" not in rows.column_names:
        raise ValueError(f"dataset: expected a column 'text' in {name}, got {', '.join(rows.column_names)}")
    return name, ((f"{name}[{index}]", row["text"].encode()) for index, row in enumerate(rows)), None
