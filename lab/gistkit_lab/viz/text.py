"""Pictures of a text whose tokens are shaded by a number, with marks on selected tokens, in HTML and matplotlib."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from html import escape
from typing import Literal

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from gistkit.common.checks import at_least, one_of
from gistkit.viz.browser import file_of
from gistkit.viz.legible import legible, symbol_of
from gistkit.viz.style import COLOURS, Picture
from gistkit_lab.evaluate.token_types import check_selected, check_tokens
from gistkit_lab.viz.flow import flow, width_of

Scale = Literal["rank", "linear"]
# Black text is legible on the darkest shade of all.
NUGGET_SHADES = LinearSegmentedColormap.from_list("nugget", ["#C8EEDF", COLOURS["green"]])
SHADES = LinearSegmentedColormap.from_list("score", ["#FFFFFF", "#8C8C8C"])
PLAIN_SHADES = LinearSegmentedColormap.from_list("plain", ["#FFFFFF", "#4D9CC9"])
# Of nuggets, of the tokens beside them, and of a text without nuggets; in HTML colour, least and most opacity.
RAMPS = {True: NUGGET_SHADES, False: SHADES, None: PLAIN_SHADES}
TINTS = {True: ("0,158,115", 0.25, 0.6), False: ("128,128,128", 0.0, 0.6), None: ("0,114,178", 0.0, 0.7)}
MOST_LINES = 1000
# In inches: a column as wide as a character of DejaVu Sans Mono at 9 points.
COLUMN, LINE, MARGIN = 0.602 * 9 / 72, 0.21, 0.2


def text_html(
    tokens: Sequence[str],
    scores: ArrayLike,
    selected: ArrayLike | None = None,
    *,
    label: str = "score",
    scale: Scale = "rank",
    title: str = "",
) -> str:
    """A text as an HTML fragment: every token is shaded by its number, which shows on hover; nuggets are green.

    The numbers may be scores of nuggets, the attention of one query over the text, or each token's loss. Shades are
    translucent, for light and dark pages: the higher the number, the farther from the page's colour.

    Args:
        tokens: decoded pieces of text, at least one; white space in them is kept, line breaks are marked.
        scores: [number of tokens], without NaN.
        selected: bool [number of tokens], True at the nuggets; None: the text has none.
        label: what the numbers are, such as "attention" or "loss (nats)".
        scale: "rank" shades by the rank in the text, so that an outlier does not hide differences; "linear" from 0 to
            the highest number, for finite numbers >= 0.
        title: a heading.

    Raises:
        TypeError: if a token is no string or `selected` is not bool.
        ValueError: if there is no token, a score is NaN or does not suit the scale, or there is not one score and one
            of `selected` a token.

    Paper: Dodo, Figure 7.
    """
    values, is_nugget, shades = _check_text("text_html", tokens, scores, selected, scale)
    # Notebooks would typeset text between dollar signs as a formula.
    lines = ['<div class="mathjax_ignore tex2jax_ignore" style="line-height:1.7">']
    if title:
        lines.append(f'<div style="font-weight:bold">{escape(title)}</div>')
    pieces = [
        _element(nugget, shade, f"{label} {value:.4g}{', nugget' if nugget else ''}", _html(token))
        for token, value, shade, nugget in zip(tokens, values, shades, is_nugget, strict=True)
    ]
    # The text is one line of the source: a line break there would show.
    lines.append(f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(pieces)}</div>')
    blank = "&nbsp;&nbsp;&nbsp;"
    ramps = ["".join(_element(kind, step / 4, "", blank) for step in range(5)) for kind in _kinds(is_nugget)]
    lowest, note = (values.min(), ", shaded by rank") if scale == "rank" else (0.0, "")
    legend = f"{escape(label)} {lowest:.4g} {ramps[0]} {values.max():.4g}{note}"
    if selected is not None:
        legend += f"; {ramps[1]} nuggets: {sum(map(bool, is_nugget))} of {len(tokens)} tokens"
    lines.append(f'<div style="font-size:85%;margin-top:.5em">{legend}</div>\n</div>')
    return "\n".join(lines)


PAGE = """\
<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<form autocomplete="off">{theme}</form>
{content}
</body>
</html>
"""


def text_page(
    tokens: Sequence[str],
    scores: ArrayLike,
    selected: ArrayLike | None = None,
    *,
    label: str = "score",
    scale: Scale = "rank",
    title: str = "Text",
) -> str:
    """`text_html` as a whole HTML document, which a browser shows without a network; the same arguments and errors."""
    # A file of UTF-8 has no surrogates, which file names may have.
    title, label = legible(title), legible(label)
    content = text_html(tokens, scores, selected, label=label, scale=scale, title=title)
    style, theme = file_of("theme.css"), file_of("theme.html")
    return PAGE.format(title=escape(title), content=content, style=style, theme=theme)


def _element(nugget: bool | None, shade: float, hint: str, content: str) -> str:
    colour, least, most = TINTS[nugget]
    style = f"background:rgba({colour},{least + (most - least) * shade:.2f});color:inherit;border-radius:3px"
    if nugget:
        # A sign beside the colour.
        style += f";font-weight:bold;box-shadow:inset 0 -2px {COLOURS['green']}"
    name = "mark" if nugget else "span"
    return f'<{name} style="{style}"' + (f' title="{escape(hint)}"' if hint else "") + f">{content}</{name}>"


def _html(token: str) -> str:
    """A token's text; marks of invisible characters are not copied, and not read aloud."""
    mark = '<span aria-hidden="true" style="user-select:none;opacity:.6">{}</span>'
    text = "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else symbol_of(char) for char in token
    )
    return escape(text).replace("\n", mark.format("↵") + "\n") if token else mark.format(symbol_of(""))


def draw_text(
    tokens: Sequence[str],
    scores: ArrayLike,
    selected: ArrayLike | None = None,
    *,
    label: str = "score",
    scale: Scale = "rank",
    columns: int = 88,
    title: str = "",
) -> Figure:
    """A text in lines of a fixed width, every token's box shaded by its number, nuggets bold on green.

    The bars below show the numbers of the shades.

    Args:
        tokens, scores, selected, label, scale: as in `text_html`; a text of at most 1000 lines. Line breaks are marked,
            and so is white space that is no space.
        columns: characters a line, at least 20; those of double width count twice.
        title: a heading.

    Raises:
        TypeError, ValueError: as `text_html`, and if the text has too many lines.

    Paper: Dodo, Figure 7.
    """
    values, is_nugget, shades = _check_text("draw_text", tokens, scores, selected, scale)
    columns = at_least("draw_text", "columns", columns, 20)
    pieces = list(flow(tokens, columns))
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
    for token, line, column, text in pieces:
        colour = RAMPS[is_nugget[token]](shades[token])
        box = Rectangle((column, line + 0.06), width_of(text), 0.88, facecolor=colour, edgecolor="white", linewidth=0.8)
        axes.add_patch(box)
        weight = "bold" if is_nugget[token] else "normal"
        axes.text(column, line + 0.7, text, weight=weight, family="monospace", fontsize=9, parse_math=False)
    if title:
        figure.text(MARGIN / width, 1 - 0.2 / height, title, fontsize=12, va="top", parse_math=False)
    # A bar's name needs an inch.
    kinds, bar_left = _kinds(is_nugget), 2 * MARGIN if selected is None else 1.0
    bars = figure.add_axes(
        (bar_left / width, 0.5 / height, (min(width, 6.4) - bar_left - 2 * MARGIN) / width, 0.18 * len(kinds) / height)
    )
    ramp, ticks = np.linspace(0, 1, 256), np.linspace(0, 1, 5)
    bars.imshow(
        [RAMPS[kind](ramp) for kind in kinds], aspect="auto", extent=(0, 1, len(kinds), 0), interpolation="nearest"
    )
    at = np.quantile(values, ticks, method="nearest") if scale == "rank" else ticks * values.max()
    bars.set_xticks(ticks, [f"{value:.3g}" for value in at], fontsize=8)
    bars.set_xlabel(f"{label}, shaded by rank" if scale == "rank" else label, fontsize=8, parse_math=False)
    if selected is None:
        bars.set_yticks([])
    else:
        bars.set_yticks([0.5, 1.5], ["other tokens", "nuggets"], fontsize=8)
        bars.axhline(1, color="white", linewidth=2)
    bars.tick_params(length=0)
    bars.spines[:].set_visible(False)
    return figure


def _kinds(is_nugget: Sequence[bool | None]) -> tuple[bool | None, ...]:
    """The kinds of tokens that a legend explains."""
    return (None,) if is_nugget[0] is None else (False, True)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0, the lowest, to 1; equal values share their mean rank."""
    if len(values) == 1:
        return np.full(1, 0.5)
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2
    return middle[place] / (len(values) - 1)


def _check_text(
    function: str, tokens: Sequence[str], scores: ArrayLike, selected: ArrayLike | None, scale: str
) -> tuple[NDArray[np.float64], Sequence[bool | None], NDArray[np.float64]]:
    """The numbers, whether each token is a nugget (None: there are no nuggets), and the shades, 0 to 1."""
    check_tokens(function, tokens)
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(tokens),):
        raise ValueError(f"{function}: expected scores of shape [{len(tokens)}], one a token, got {list(values.shape)}")
    if np.isnan(values).any():
        raise ValueError(f"{function}: expected scores to be numbers, got NaN at token {np.isnan(values).argmax()}")
    one_of(function, "scale", scale, ("rank", "linear"))
    invalid = ~np.isfinite(values) | (values < 0)
    if scale == "linear" and invalid.any():
        at = int(invalid.argmax())
        raise ValueError(
            f"{function}: expected finite scores >= 0 for a linear scale, got {values[at]:g} at token {at}"
        )
    shades = _ranks(values) if scale == "rank" else values / (values.max() or 1.0)
    if selected is None:
        return values, [None] * len(tokens), shades
    return values, check_selected(function, selected, len(tokens)).tolist(), shades
