"""Writing: the text of tokens that come one by one, given out in whole words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# Where a word ends: before a space, and behind each character of scripts that have no spaces.
_SPACE = re.compile(r"\s")
_UNSPACED = re.compile("[\u2e80-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff]")


class Writing:
    """The text of an answer so far. The pieces that `look` returns make, joined, the text of all tokens.

    Spaces around the text are no part of it, as in `Compressor.ask`. A piece ends with a word, because what a tokenizer
    makes of a token may still change with the next one.

    Args:
        decode: token ids to a text.
        stops: texts of which the first to come ends the answer, and is no part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self.tokens: list[int] = []
        self.text = ""
        """What was given out so far."""
        self.stopped = False

    def add(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)

    def look(self, end: bool = False) -> str:
        """What is new in the text and will not change any more; all that is left where it ends."""
        text = self._decode(self.tokens)
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            text, self.stopped, end = text[: min(places)], True, True
        text = text.strip() if end else text[: self._safe(text)].strip()
        piece = text[len(self.text) :]
        self.text += piece
        return piece

    def _safe(self, text: str) -> int:
        """How much of a text that goes on stays as it is, and begins no stop."""
        # The bytes of a character that has not come to its end.
        text = text.rstrip("\ufffd")
        spaces = [match.start() for match in _SPACE.finditer(text)]
        unspaced = [match.end() for match in _UNSPACED.finditer(text)]
        safe = max([0, *spaces[-1:], *unspaced[-1:]])
        for stop in self._stops:
            # The longest end of the text that the stop begins with.
            held = next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
            safe = min(safe, len(text) - held)
        return safe
