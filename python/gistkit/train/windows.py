"""Windows: one passage of each long text, from a random place in it, as More Effective LLM Compressed Tokens trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gistkit.train.stored import IdStore
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
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")

    def stream(self, tokenizer: Any, store: IdStore, part: int) -> IdStream:
        """The passages of the documents of a part, which has a number of its own."""
        return _WindowStream(tokenizer, store, self, part)


class _WindowStream(IdStream):
    """Passages of documents, into a store; of a document only what may be in its passage is in memory."""

    def __init__(self, tokenizer: Any, store: IdStore, windows: Windows, part: int) -> None:
        super().__init__(tokenizer, store)
        self.windows, self.part = windows, part
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self._pending = ""
        # A document's place depends on no other document.
        self._random = np.random.default_rng([self.windows.seed, self.part, self._number])
        self._number += 1
        # Characters and passages of the document so far, its last ids, and the passage that is chosen of it.
        self._characters = self._seen = 0
        self._last = self._chosen = np.empty(0, np.int32)

    def separator(self, continues: bool) -> bytes:
        """Nothing: no passage is of two documents."""
        return b""

    def add(self, source: str, part: bytes, continues: bool) -> None:
        """Appends a part of the document `source`; what does not continue it ends it."""
        if not continues:
            self.flush()
        # Bytes that do not begin a character are 10xxxxxx.
        self._characters += int(np.count_nonzero(np.frombuffer(part, np.uint8) & 0xC0 != 0x80))
        super().add(source, part, continues)

    def flush(self) -> None:
        """Ends a document: its passage goes to the store, if it has one."""
        if not self._characters:
            return
        # A short one is not even tokenised.
        if self._characters > self.windows.longer_than:
            super().flush()
            if self._seen:
                self.store.append(self._chosen)
        self._begin()

    def put(self, ids: np.ndarray) -> None:
        """The next ids [n] of the document: each of its passages so far is the chosen one with equal chances."""
        length = self.windows.length
        joined = np.concatenate([self._last.astype(ids.dtype), ids])
        new = len(joined) - length + 1
        if new > 0:
            at = int(self._random.integers(self._seen + new)) - self._seen
            if at >= 0:
                self._chosen = joined[at : at + length].copy()
            self._seen += new
        self._last = joined[max(new, 0) :]
