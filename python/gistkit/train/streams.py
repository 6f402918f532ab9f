"""Streams: the token ids of texts, one text after another."""

from __future__ import annotations

from typing import IO, Any

import numpy as np

# Documents are joined by an empty line.
SEPARATOR = b"\n\n"
# Texts are tokenised in pieces of so many characters, for visible progress and bounded memory.
PIECE = 1 << 19


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


class IdStream:
    """Ids of documents one after another, into a file of nothing else; all have one dtype."""

    def __init__(self, tokenizer: Any, file: IO[bytes]) -> None:
        self.tokenizer, self.file = tokenizer, file
        self.documents = self.count = 0
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._pending = ""

    def begin(self) -> bytes:
        """Begins a document; returns what stands before it."""
        self.documents += 1
        return SEPARATOR if self.documents > 1 else b""

    def add(self, source: str, part: bytes | memoryview) -> None:
        """Appends a part of the document `source`, in which no character is divided."""
        if self.tokenizer is None:
            self.put(np.frombuffer(part, np.uint8))
            return
        try:
            text = self._pending + bytes(part).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{source}: expected UTF-8 text, got byte {part[error.start]:#x} in it") from error
        start = 0
        while len(text) - start > PIECE:
            # At the end of a line, where there is one.
            end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
            self._encode(text[start:end])
            start = end
        self._pending = text[start:]

    def flush(self) -> None:
        """Encodes what waits for more text."""
        if self._pending:
            self._encode(self._pending)
            self._pending = ""

    def put(self, ids: np.ndarray) -> None:
        """The next ids [n]."""
        self.dtype = ids.dtype
        self.count += len(ids)
        self.file.write(ids.tobytes())

    def _encode(self, text: str) -> None:
        self.put(np.array(token_ids(self.tokenizer, text), np.int32))
