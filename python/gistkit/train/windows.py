"""Windows: one passage of each long text, from a random place in it, as More Effective LLM Compressed Tokens trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from gistkit.common.checks import check_int
from gistkit.train.streams import IdStream


@dataclass(frozen=True)
class Windows:
    """Which passages of a text's documents are its corpus (Section 3), one after another: cut it with `Packed`.

    Args:
        longer_than: documents of more characters than this, at least 0, have a passage each; the others have none.
        length: ids of a passage, at least 1; documents with fewer have none either.
        seed: of the places, which are uniform in each document; at least 0.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """

    longer_than: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("longer_than", 0), ("length", 1), ("seed", 0)):
            check_int(name, getattr(self, name), least)

    def stream(self, tokenizer: Any, file: IO[bytes], part: int) -> IdStream:
        """The passages of the documents of a part, which has a number of its own."""
        return _WindowStream(tokenizer, file, self, part)


class _WindowStream(IdStream):
    """Passages of documents; the ids of a document are in memory until its passage is chosen."""

    def __init__(self, tokenizer: Any, file: IO[bytes], windows: Windows, part: int) -> None:
        super().__init__(tokenizer, file)
        self.windows, self.part = windows, part
        self._characters, self._ids = 0, [np.empty(0, np.int32)]

    def begin(self) -> bytes:
        """Ends the document before; nothing stands between two: no passage is of both."""
        self.flush()
        self.documents += 1
        return b""

    def add(self, source: str, part: bytes | memoryview) -> None:
        # Bytes that do not begin a character are 10xxxxxx.
        self._characters += int(np.count_nonzero(np.frombuffer(part, np.uint8) & 0xC0 != 0x80))
        super().add(source, part)

    def flush(self) -> None:
        """Ends a document: its passage goes to the file, if it has one."""
        # A short one is not even tokenised.
        if self._characters > self.windows.longer_than:
            super().flush()
            ids, length = np.concatenate(self._ids[1:] or self._ids), self.windows.length
            if len(ids) >= length:
                # A document's place depends on no other document.
                random = np.random.default_rng([self.windows.seed, self.part, self.documents - 1])
                at = int(random.integers(len(ids) - length + 1))
                super().put(ids[at : at + length])
        self._pending, self._characters, self._ids = "", 0, self._ids[:1]

    def put(self, ids: np.ndarray) -> None:
        self._ids.append(ids)
