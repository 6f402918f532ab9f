"""Parts of messages: values and errors of any size, in one line. Without torch, for commands that only refuse."""

from __future__ import annotations

import reprlib
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def shown(value: Any) -> str:
    """A value of any size and depth, in a part of a line."""
    if isinstance(value, str) and len(value) <= 60 and value.isprintable():
        return value
    return _repr.repr(value)


def one_line(message: object, most: int = 300) -> str:
    """A message, or an error's, in one line; of one longer than `most` characters the beginning and the end."""
    text = " ".join(str(message).split()) or type(message).__name__
    return text if len(text) <= most else f"{text[: most - most // 4]} ... {text[-most // 4 :]}"
