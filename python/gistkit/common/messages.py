"""Parts of messages: values and errors of any size, in one line. Without torch, for commands that only refuse."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


# What a terminal obeys: control characters but the line's end and the tab, and what turns the direction of writing.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Progress bars move in their lines by these.
_OF_BARS = re.compile(r"\r|\x1b\[A")


def refuse(where: str, options: Mapping[str, Any]) -> None:
    """Refuses options that would do nothing: all but None."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: not allowed {where}, got {value!s:.60}")


def plain(text: str) -> str:
    """A text without what a terminal would obey; each such character is a sign of one."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


class _Plain:
    """A stream to a terminal that shows what it is given as `plain` text, but how `kept` moves."""

    def __init__(self, stream: Any, kept: re.Pattern[str] | None = None) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> int:
        words, moves = (
            ([text], [""]) if self._kept is None else (self._kept.split(text), [*self._kept.findall(text), ""])
        )
        self._stream.write("".join(plain(word) + move for word, move in zip(words, moves, strict=True)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def plain_terminals() -> Iterator[None]:
    """Inside, what models and files say reaches a terminal as text, whoever prints it; other outputs get it as it is.

    A title, a clipboard or a screen is not theirs to set.
    """
    before = sys.stdout, sys.stderr
    if before[0] is not None and before[0].isatty():
        sys.stdout = _Plain(before[0])  # type: ignore[assignment]
    if before[1] is not None and before[1].isatty():
        sys.stderr = _Plain(before[1], _OF_BARS)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def shown(value: Any) -> str:
    """A value of any size and depth, in a part of a line."""
    if isinstance(value, str) and len(value) <= 60 and value.isprintable():
        return value
    return _repr.repr(value)


def one_line(message: object, most: int = 300) -> str:
    """A message, or an error's, in one line; of one longer than `most` characters the beginning and the end."""
    text = " ".join(str(message).split()) or type(message).__name__
    return text if len(text) <= most else f"{text[: most - most // 4]} ... {text[-most // 4 :]}"
