"""Corpus: text as streams of token ids, by default the standard library's documentation, or files, or a dataset."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gistkit.train.documents import HELD, HELD_OUT, TEST, TRAIN, dataset_documents, file_documents, topics

# Documents are joined by an empty line.
SEPARATOR = b"\n\n"
# Texts are tokenised in pieces of so many characters, for visible progress and bounded memory.
PIECE = 1 << 19


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out token ids, a stream each. `load_corpus` says what is held out.

    Args:
        name: where the text comes from.
        train: [n] token ids, uint8 for bytes, otherwise int32.
        held_out: the same.
        digest: first 12 hexadecimal digits of the SHA-256 of the text, to tell texts apart.
        tokenizer: the tokenizer of the ids; None if they are bytes.
        test: ids of a dataset's official test split, where `held_out` is its validation split; otherwise None.
    """

    name: str
    train: Tensor
    held_out: Tensor
    digest: str
    tokenizer: Any = None
    test: Tensor | None = None

    @property
    def unit(self) -> str:
        """The name of an id in messages."""
        return "bytes" if self.tokenizer is None else "tokens"

    def splits(self) -> dict[str, Tensor]:
        """Ids by "held_out", for choices, and "test", for final figures; without an official test split, halves."""
        if self.test is not None:
            return {"held_out": self.held_out, "test": self.test}
        half = self.held_out.numel() // 2
        return {"held_out": self.held_out[:half], "test": self.held_out[half:]}

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
                f"text: expected at least {length} {self.unit} in the held-out part of {self.name}, "
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

    Whole documents are held out, about a tenth of the text: of a folder, files at even distances; of a dataset, its
    split "validation", or else "test", or else the first documents of its rows. One document is cut, and its last tenth
    is held out. The documentation is one work too, of which the last tenth of every topic is held out: its held-out
    text goes on with subjects, and not with passages, that were trained on.

    Args:
        text: a file, or a folder whose .txt, .md and .rst files are documents. With neither it nor `dataset`, the
            text is `pydoc_data.topics`, 460 KB of English that comes with Python.
        dataset: name of a Hugging Face dataset, "owner/name" or "owner/name:configuration", whose split "train" has a
            column "text". A row is a document; in WikiText, whose rows are lines, an article is, from title to title.
            Needs the package `datasets`.
        tokenizer: a transformers tokenizer, or a function of a string that returns token ids; None: UTF-8 bytes.
        limit: training ids to keep; reading stops soon after them, a dataset is streamed, and of held-out documents so
            many are read as make a tenth of all. None: all.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError: if there is no such file, or no text file in the folder.
        ImportError: if `datasets` is needed and not installed.
        ValueError: if the text is not UTF-8 (with a tokenizer), both `text` and `dataset` are given, or the dataset has
            no split "train" or no column "text".
    """
    if text is not None and dataset is not None:
        raise ValueError(f"dataset: expected none beside a text, got {dataset!r} and {str(text)!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1, got {limit}")
    streams = {part: _IdStream(tokenizer) for part in (TRAIN, HELD, TEST)}

    def enough(part: str) -> bool:
        if limit is None:
            return False
        streams[part].flush()
        return streams[part].count >= limit * HELD_OUT / (1 - HELD_OUT)

    if dataset is not None:
        name, documents, size = dataset_documents(dataset, enough, streaming=limit is not None)
    else:
        name, documents, size = topics() if text is None else file_documents(Path(text), enough)
    parts: dict[str, list[bytes]] = {HELD: [b"\0"], TEST: [b"\0"]}
    digest = hashlib.sha256()
    with tqdm(total=size, desc=f"reading {name}", unit="B", unit_scale=True, disable=not progress) as bar:
        for part, source, content, divided in documents:
            stream, separator = streams[part], SEPARATOR if streams[part].documents else b""
            if part == TRAIN:
                digest.update(separator + content)
            else:
                parts[part].append(separator + content)
            if tokenizer is not None:
                content = content + divided if part == TRAIN else content.removeprefix(divided)
            stream.add(source, separator + content)
            bar.update(len(content))
            if limit is not None and streams[TRAIN].count >= limit:
                break
    digest.update(b"".join(parts[HELD]))
    if streams[TEST].documents:
        digest.update(b"".join(parts[TEST]))
    train, held_out, test = (torch.from_numpy(stream.finish()) for stream in streams.values())
    official_test = test if streams[TEST].documents else None
    return Corpus(name, train[:limit], held_out, digest.hexdigest()[:12], tokenizer, official_test)


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
        self.documents = 0
        self._ids: list[np.ndarray] = []
        self._pending = ""

    def add(self, source: str, part: bytes) -> None:
        """Appends a part of the document `source`."""
        self.documents += 1
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
        self.flush()
        return np.concatenate(self._ids) if self._ids else np.empty(0, np.uint8)

    def flush(self) -> None:
        """Encodes what waits for more text."""
        if self._pending:
            self._encode(self._pending)
            self._pending = ""

    def _encode(self, text: str) -> None:
        self._append(np.array(token_ids(self.tokenizer, text), np.int32))

    def _append(self, ids: np.ndarray) -> None:
        self._ids.append(ids)
        self.count += len(ids)
