"""A text's tokens in lines of a fixed width."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gistkit.viz.legible import legible, symbol_of


class Piece(NamedTuple):
    """The part of a token that stands in one line."""

    token: int
    line: int
    column: int
    text: str


def width_of(text: str) -> int:
    """Columns of a text in a font of fixed width."""
    return sum(
        0 if unicodedata.category(char) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def flow(tokens: Sequence[str], columns: int) -> Iterator[Piece]:
    """The places of the tokens: words stay whole if they fit into a line, then tokens, then characters."""
    line = column = 0
    for word in _words(tokens):
        widths = [width_of(legible("".join(tokens[token].partition("\n")[:2]))) for token in word]
        if column and column + sum(widths) > columns >= sum(widths):
            line, column = line + 1, 0
        for token, width in zip(word, widths, strict=True):
            if column and column + width > columns >= width:
                line, column = line + 1, 0
            start, text = column, ""
            for char in tokens[token] or [""]:
                symbol = symbol_of(char)
                if column and column + width_of(symbol) > columns:
                    if text:
                        yield Piece(token, line, start, text)
                    line, start, column, text = line + 1, 0, 0, ""
                text, column = text + symbol, column + width_of(symbol)
                if char == "\n":
                    yield Piece(token, line, start, text)
                    line, start, column, text = line + 1, 0, 0, ""
            if text:
                yield Piece(token, line, start, text)


def _words(tokens: Sequence[str]) -> Iterator[list[int]]:
    """Runs of tokens without white space where they meet."""
    word: list[int] = []
    for place, token in enumerate(tokens):
        if word and (token[:1].isspace() or tokens[place - 1][-1:].isspace()):
            yield word
            word = []
        word.append(place)
    yield word
