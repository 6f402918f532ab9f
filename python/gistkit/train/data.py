"""Corpus: text as streams of token ids, by default the standard library's documentation, or files, or a dataset."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gistkit.common.checks import check_int
from gistkit.train.document_files import file_documents
from gistkit.train.documents import HELD, HELD_OUT, TEST, TRAIN, Documents, Table, dataset_documents, name_of, topics
from gistkit.train.stored import kept, tokenizer_key
from gistkit.train.streams import IdStream
from gistkit.train.windows import Windows

# Texts of so many bytes or more, or of an unknown size, are written once where there is a folder for their ids.
LARGE = 1 << 26
# The name of such a folder in that of a run, or beside the file of an evaluation.
CACHE = "data"
PARTS = (TRAIN, HELD, TEST)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out token ids, a stream each. `load_corpus` says what is held out.

    Args:
        name: where the text comes from.
        train: [n] token ids, uint8 for bytes, otherwise int32.
        held_out: the same.
        digest: first 12 hexadecimal digits of the SHA-256 of the text, to distinguish texts.
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
                f"got {self.held_out.numel()} (and {self.train.numel()} to train on); give more text, or a smaller "
                "max_length"
            )


def load_corpus(
    text: str | Path | None = None,
    *,
    dataset: str | Table | Mapping[str, Table] | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
    cache: str | Path | None = None,
    held_out_only: bool = False,
    windows: Windows | None = None,
    split: str | None = None,
    progress: bool = False,
) -> Corpus:
    """Reads and tokenises a text, one document or piece of one at a time.

    Whole documents are held out: the official splits of a text, or else about a tenth of it: of a folder of texts,
    files at even distances, and of rows, the first. One document is cut, and its last tenth is held out. The
    documentation is one work too, of which the last tenth of every topic is held out: its held-out text goes on with
    subjects, and not with passages, that were trained on.

    Args:
        text: a file, or a folder, plain, gzip or zstd. Its .txt, .md and .rst files are documents. Rows of .jsonl files
            are documents too, in the field "text", as in the Pile and SlimPajama, and of .json files, as in C4; so are
            articles, from title to title, of WikiText's .raw and .tokens files. Names show official splits: `train/`,
            `val.jsonl.zst`, `wiki.test.raw`, `test.txt`. With neither a text nor `dataset`, it is `pydoc_data.topics`,
            460 KB of English that comes with Python.
        dataset: name of a Hugging Face dataset, "owner/name" or "owner/name:configuration", whose split "train" has a
            column "text"; that needs the package `datasets`. Or the dataset itself: a `DatasetDict`, or one `Dataset`
            or `IterableDataset`, whose rows are read in their order. A row is a document; in WikiText, whose rows are
            lines, an article is. Official splits are "validation" and "test". Without these, and without a limit, the
            rows of a stream are counted first.
        tokenizer: a transformers tokenizer, or a function of a string that returns token ids; None: UTF-8 bytes.
        limit: training ids to keep; reading stops soon after them, a dataset is streamed, and of held-out documents so
            many are read as make a tenth of all. None: all.
        cache: folder for the ids of texts from about 64 MiB on, or of an unknown size, which are then mapped and not in
            memory. They are written once: the same files with the same tokenizer of transformers are not read again;
            others are in files without a name. None: memory.
        held_out_only: whether nothing of files and datasets is read but what is held out, which the digest is then of.
        windows: which passages of the documents are the corpus; None: the whole text.
        split: "validation" or "test", the official split that is held out; a file that is named after it, such as
            `wiki.test.tokens`, is held out whole. None: the first of these that there is.
        progress: whether to show a progress bar.

    Raises:
        FileNotFoundError: if there is no such file, or no text file in the folder.
        ImportError: if a package is missing: `datasets`, or `pyarrow` for zstd and Parquet.
        ValueError: if the text is not UTF-8 (with a tokenizer), a row has no text (named with file and line), both
            `text` and `dataset` are given, the dataset has no split "train" or no column "text" or is an iterator, the
            text has no `split`, or the documents have none of the `windows`.
    """
    if text is not None and dataset is not None:
        raise ValueError(f"dataset: not allowed with a text, got {name_of(dataset)!r} and {str(text)!r}")
    if limit is not None:
        check_int("limit", limit)
    # The topics alternate between their parts.
    held_out_only = held_out_only and not (text is None and dataset is None)
    reading = _Reading(tokenizer, limit, held_out_only, windows, progress)
    enough = None if limit is None else reading.enough
    if dataset is not None:
        documents = dataset_documents(dataset, enough, split)
    elif text is None:
        documents = topics(split)
    else:
        documents = file_documents(Path(text), enough, split)
    sizes = [size for size in (documents.size, limit and 4 * limit) if size is not None]
    folder = None if cache is None or (sizes and min(sizes) < LARGE) else Path(cache)
    values: object = None
    keys = documents.key, tokenizer_key(tokenizer)
    if None not in keys:
        values = (*keys, limit, held_out_only, windows, split)
    about, arrays = kept(folder, values, PARTS, lambda files: reading.read(documents, files))
    train, held_out, test = (torch.from_numpy(arrays[part]) for part in PARTS)
    if windows is not None and not (held_out.numel() and (train.numel() or held_out_only)):
        raise ValueError(
            f"longer_than: expected documents of more than {windows.longer_than} characters and at least "
            f"{windows.length} {'bytes' if tokenizer is None else 'tokens'} in both parts of {documents.name}, got "
            f"{train.numel() // windows.length} to train on and {held_out.numel() // windows.length} held out"
        )
    return Corpus(
        documents.name, train[:limit], held_out, about["digest"], tokenizer, test if about["official"] else None
    )


class _Reading:
    """The parts of a text as ids, and what is known of them when they are read."""

    def __init__(
        self, tokenizer: Any, limit: int | None, held_out_only: bool, windows: Windows | None, progress: bool
    ) -> None:
        self.tokenizer, self.limit, self.held_out_only, self.progress = tokenizer, limit, held_out_only, progress
        self.windows = windows
        self.streams: dict[str, IdStream] = {}

    def enough(self, part: str) -> bool:
        """Whether a part has as many ids as are wanted of it, at the end of a document."""
        self.streams[part].flush()
        return self.streams[part].count >= cast(int, self.limit) * HELD_OUT / (1 - HELD_OUT)

    @property
    def _full(self) -> bool:
        return self.limit is not None and self.streams[TRAIN].count >= self.limit

    def _stream(self, part: str, file: IO[bytes]) -> IdStream:
        if self.windows is None:
            return IdStream(self.tokenizer, file)
        return self.windows.stream(self.tokenizer, file, PARTS.index(part))

    def read(self, text: Documents, files: Mapping[str, IO[bytes]]) -> dict[str, Any]:
        """Tokenises the text, into files by part; its digest, whether it has a test split, and sizes."""
        self.streams = streams = {part: self._stream(part, file) for part, file in files.items()}
        digest = hashlib.sha256(b"" if self.windows is None else repr(self.windows).encode())
        bar = tqdm(total=text.size, desc=f"reading {text.name}", unit="B", unit_scale=True, disable=not self.progress)
        with bar, ExitStack() as stack:
            # The digest is of the training text first, which is read last.
            waiting = {part: stack.enter_context(tempfile.SpooledTemporaryFile(LARGE)) for part in (HELD, TEST)}
            for document in text.documents:
                stream = streams[document.part]
                if document.part == TRAIN and self.held_out_only:
                    break
                write: Callable[[Any], Any] = digest.update if document.part == TRAIN else waiting[document.part].write
                separator = stream.begin()
                write(separator)
                stream.add(document.source, separator)
                for block, whole in document.blocks():
                    write(block)
                    stream.add(document.source, block if self.tokenizer is None else whole)
                    bar.update(len(block))
                    if self._full:
                        break
                if self._full:
                    break
            for part in (HELD, TEST):
                if part == HELD or streams[TEST].documents:
                    digest.update(b"\0")
                    waiting[part].seek(0)
                    while block := waiting[part].read(1 << 20):
                        digest.update(block)
        for stream in streams.values():
            stream.flush()
        return {
            "digest": digest.hexdigest()[:12],
            "official": bool(streams[TEST].documents),
            "dtypes": {part: stream.dtype.str for part, stream in streams.items()},
            "counts": {part: stream.count for part, stream in streams.items()},
        }
