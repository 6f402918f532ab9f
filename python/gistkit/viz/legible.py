"""Tokens with visible symbols for invisible characters, and the columns that a text takes."""

from __future__ import annotations

import unicodedata


def symbol_of(char: str) -> str:
    """A character as it is drawn: a visible symbol for line breaks, tabs and unprintable characters."""
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


_SYMBOLS = {"": "∅", "\n": "↵", "\t": "⇥"}


def legible(token: str) -> str:
    """A token with visible symbols for line breaks, tabs and unprintable characters."""
    return "".join(map(symbol_of, token)) or symbol_of("")


def width_of(text: str) -> int:
    """Columns of a text in a font of fixed width."""
    return sum(
        0 if unicodedata.category(char) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )
