"""Tokens with visible symbols for invisible characters."""

from __future__ import annotations


def symbol_of(char: str) -> str:
    """A character as it is drawn: a visible symbol for line breaks, tabs and unprintable characters."""
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


_SYMBOLS = {"": "∅", "\n": "↵", "\t": "⇥"}


def legible(token: str) -> str:
    """A token with visible symbols for line breaks, tabs and unprintable characters."""
    return "".join(map(symbol_of, token)) or symbol_of("")
