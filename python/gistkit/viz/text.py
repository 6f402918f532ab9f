"""Pictures of a text whose tokens are shaded by a score, those selected marked, in HTML and in matplotlib."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from gistkit.layouts._checks import at_least
from gistkit.viz.style import COLOURS, Picture

# Black text is legible on the darkest shade of both.
SHADES = LinearSegmentedColormap.from_list("score", ["#FFFFFF", "#8C8C8C"])
NUGGET_SHADES = LinearSegmentedColormap.from_list("nugget", ["#C8EEDF", COLOURS["green"]])
MOST_LINES = 1000
# In inches: a column as wide as a character of DejaVu Sans Mono at 9 points.
COLUMN, LINE, MARGIN = 0.602 * 9 / 72, 0.21, 0.2


def text_html(tokens: Sequence[str], scores: ArrayLike, selected: ArrayLike, *, title: str = "") -> str:
    """A text as an HTML fragment: every token shaded by its score, nuggets on green; a token's score shows on hover.

    Shades follow the rank of a score in the text, so that an outlier leaves the others apart, and are translucent, so
    that they serve on light and dark pages: the higher the score, the farther from the page's own colour.

    Args:
        tokens: decoded pieces of text, at least one; white space in them is kept, line breaks are marked.
        scores: [number of tokens], without NaN.
        selected: bool [number of tokens], True at the nuggets.
        title: a heading.

    Raises:
        TypeError: if a token is no string or `selected` is not bool.
        ValueError: if there is no token, a score is NaN, or there is not one score and one of `selected` a token.

    Paper: Dodo, Figure 7.
    """
    values, chosen = _checked("text_html", tokens, scores, selected)
    # Notebooks would set what stands between dollar signs as a formula.
    lines = ['<div class="mathjax_ignore tex2jax_ignore" style="line-height:1.7">']
    if title:
        lines.append(f'<div style="font-weight:bold">{escape(title)}</div>')
    pieces = [
        _element(nugget, shade, f"score {value:.4g}{', nugget' if nugget else ''}", _html(token))
        for token, value, shade, nugget in zip(tokens, values, _ranks(values), chosen, strict=True)
    ]
    # The text stands in one line of the source: a break there would show.
    lines.append(f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(pieces)}</div>')
    scale = [
        "".join(_element(nugget, step / 4, "", "&nbsp;&nbsp;&nbsp;") for step in range(5)) for nugget in (False, True)
    ]
    lines.append(
        f'<div style="font-size:85%;margin-top:.5em">score {values.min():.4g} {scale[0]} {values.max():.4g}, shaded by '
        f"rank; {scale[1]} nuggets: {chosen.sum()} of {len(tokens)} tokens</div>\n</div>"
    )
    return "\n".join(lines)


def _element(nugget: bool, shade: float, hint: str, content: str) -> str:
    colour, opacity = ("0,158,115", 0.25 + 0.35 * shade) if nugget else ("128,128,128", 0.6 * shade)
    style = f"background:rgba({colour},{opacity:.2f});color:inherit;border-radius:3px"
    if nugget:
        # A sign beside the colour.
        style += f";font-weight:bold;box-shadow:inset 0 -2px {COLOURS['green']}"
    name = "mark" if nugget else "span"
    return f'<{name} style="{style}"' + (f' title="{hint}"' if hint else "") + f">{content}</{name}>"


def _html(token: str) -> str:
    """A token's text; marks of what cannot be seen in it are left out where it is copied or read aloud."""
    mark = '<span aria-hidden="true" style="user-select:none;opacity:.6">{}</span>'
    text = "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else _symbol(char) for char in token
    )
    return escape(text).replace("\n", mark.format("↵") + "\n") if token else mark.format(_symbol(""))


def draw_text(
    tokens: Sequence[str], scores: ArrayLike, selected: ArrayLike, *, columns: int = 88, title: str = ""
) -> Figure:
    """A text in lines of a fixed width, every token's box shaded by its score, nuggets bold on green.

    Shades follow the rank of a score in the text; the bars below tell which scores they stand for.

    Args:
        tokens, scores, selected: as in `text_html`; a text of at most 1000 lines. Line breaks are marked, and so is
            white space that is no space.
        columns: characters a line, at least 20; those of double width count twice.
        title: a heading.

    Raises:
        TypeError, ValueError: as `text_html`, and if the text has too many lines.

    Paper: Dodo, Figure 7.
    """
    values, chosen = _checked("draw_text", tokens, scores, selected)
    columns = at_least("draw_text", "columns", columns, 20)
    pieces = list(_flow(tokens, columns))
    lines = pieces[-1].line + 1
    if lines > MOST_LINES:
        raise ValueError(f"draw_text: expected a text of at most {MOST_LINES} lines, got {lines}; draw a part of it")
    top, bottom = (0.5 if title else MARGIN), 1.05
    # The scale needs some width even below narrow lines.
    width, height = max(columns * COLUMN, 3.4) + 2 * MARGIN, lines * LINE + top + bottom
    figure = Picture(figsize=(width, height), dpi=120)
    axes = figure.add_axes((MARGIN / width, bottom / height, columns * COLUMN / width, lines * LINE / height))
    axes.set(xlim=(0, columns), ylim=(lines, 0))
    axes.set_axis_off()
    shades = _ranks(values)
    for token, line, column, text in pieces:
        colour = (NUGGET_SHADES if chosen[token] else SHADES)(shades[token])
        box = Rectangle((column, line + 0.06), _width(text), 0.88, facecolor=colour, edgecolor="white", linewidth=0.8)
        axes.add_patch(box)
        weight = "bold" if chosen[token] else "normal"
        axes.text(column, line + 0.7, text, weight=weight, family="monospace", fontsize=9, parse_math=False)
    if title:
        figure.text(MARGIN / width, 1 - 0.2 / height, title, fontsize=12, va="top", parse_math=False)
    _draw_scale(figure, values, shades, (1.0 / width, 0.5 / height, (min(width, 6.4) - 1.4) / width, 0.36 / height))
    return figure


def _draw_scale(
    figure: Figure, values: NDArray[np.float64], shades: NDArray[np.float64], place: tuple[float, float, float, float]
) -> None:
    axes = figure.add_axes(place)
    ramp = np.linspace(0, 1, 256)
    axes.imshow([SHADES(ramp), NUGGET_SHADES(ramp)], aspect="auto", extent=(0, 1, 2, 0), interpolation="nearest")
    ticks = np.linspace(0, 1, 5)
    scores = np.quantile(values, ticks, method="nearest")
    axes.set_xticks(ticks, [f"{score:.3g}" for score in scores], fontsize=8)
    axes.set_yticks([0.5, 1.5], ["other tokens", "nuggets"], fontsize=8)
    axes.set_xlabel("score, shaded by rank", fontsize=8)
    axes.axhline(1, color="white", linewidth=2)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


class _Piece(NamedTuple):
    """The part of a token that stands in one line."""

    token: int
    line: int
    column: int
    text: str


def _flow(tokens: Sequence[str], columns: int) -> Iterator[_Piece]:
    """Where the tokens stand: words whole where they fit into a line, then tokens, then characters."""
    line = column = 0
    for word in _words(tokens):
        widths = [_width(legible("".join(tokens[token].partition("\n")[:2]))) for token in word]
        if column and column + sum(widths) > columns >= sum(widths):
            line, column = line + 1, 0
        for token, width in zip(word, widths, strict=True):
            if column and column + width > columns >= width:
                line, column = line + 1, 0
            start, text = column, ""
            for char in tokens[token] or [""]:
                symbol = _symbol(char)
                if column and column + _width(symbol) > columns:
                    if text:
                        yield _Piece(token, line, start, text)
                    line, start, column, text = line + 1, 0, 0, ""
                text, column = text + symbol, column + _width(symbol)
                if char == "\n":
                    yield _Piece(token, line, start, text)
                    line, start, column, text = line + 1, 0, 0, ""
            if text:
                yield _Piece(token, line, start, text)


def _words(tokens: Sequence[str]) -> Iterator[list[int]]:
    """Runs of tokens without white space where they meet."""
    word: list[int] = []
    for place, token in enumerate(tokens):
        if word and (token[:1].isspace() or tokens[place - 1][-1:].isspace()):
            yield word
            word = []
        word.append(place)
    yield word


def _symbol(char: str) -> str:
    """A character as it is drawn: line breaks, tabs, and what cannot be seen as something that can."""
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


_SYMBOLS = {"": "∅", "\n": "↵", "\t": "⇥"}


def legible(token: str) -> str:
    """A token in which line breaks, tabs and unprintable characters are drawn as something that can be seen."""
    return "".join(map(_symbol, token)) or _symbol("")


def _width(text: str) -> int:
    """Columns of a text in a font of fixed width."""
    return sum(
        0 if unicodedata.category(char) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0, the lowest, to 1; equal values share the mean of theirs."""
    if len(values) == 1:
        return np.full(1, 0.5)
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2
    return middle[place] / (len(values) - 1)


def _checked(
    function: str, tokens: Sequence[str], scores: ArrayLike, selected: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise TypeError(f"{function}: expected tokens to be a sequence of strings, one a token")
    if not len(tokens):
        raise ValueError(f"{function}: expected at least one token, got none")
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(tokens),):
        raise ValueError(f"{function}: expected scores of shape [{len(tokens)}], one a token, got {list(values.shape)}")
    if np.isnan(values).any():
        raise ValueError(f"{function}: expected scores to be numbers, got NaN at token {np.isnan(values).argmax()}")
    return values, checked_selected(function, selected, len(tokens))


def checked_selected(function: str, selected: ArrayLike, count: int) -> NDArray[np.bool_]:
    """`selected` as bool [count]."""
    chosen = np.asarray(selected)
    if chosen.dtype != bool:
        raise TypeError(f"{function}: expected selected of dtype bool, got {chosen.dtype}")
    if chosen.shape != (count,):
        raise ValueError(f"{function}: expected selected of shape [{count}], one a token, got {list(chosen.shape)}")
    return chosen
