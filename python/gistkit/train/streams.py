"""Streams: the token ids of texts, one text after another."""

from __future__ import annotations

from typing import IO, Any

import numpy as np

from gistkit.common.text_ids import text_ids

# Documents are joined by an empty line.
SEPARATOR = b"\n\n"
# Texts are tokenised in pieces of so many characters, for visible progress and bounded memory.
PIECE = 1 << 19


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
        self.put(np.array(text_ids(text, self.tokenizer, special_tokens=False), np.int32))
