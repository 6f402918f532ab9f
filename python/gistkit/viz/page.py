"""Pages of layouts and attention maps: one HTML file each, which a browser shows without a network.

Their scripts are those of `browser/`, a file for each part.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import ArrayLike, NDArray

from gistkit.layouts.layout import Layout, physical_order
from gistkit.layouts.relations import Role
from gistkit.viz.browser import file_of
from gistkit.viz.layout import ROLE_COLOURS
from gistkit.viz.legible import legible

__all__ = ["MOST_CELLS", "MOST_TOKENS", "Tokens", "attention_page", "layout_page"]
MOST_TOKENS = 4096
# A page holds a byte a weight, compressed: about a third of that in a file of a causal model's maps.
MOST_CELLS = 4 * MOST_TOKENS**2
# A cell of a layout is 0, or SHADES * role + the share of its pairs that are seen, 1 to SHADES.
SHADES = 42
# A cell of an attention map is 0, or 255 + OCTAVE * log2(weight), 1 to 255: at most 2**(1/24) off.
OCTAVE = 12
# Weights below have the lightest colour.
LIGHTEST = 1e-4
# What a pair that is not seen has; that of dark pages is theirs.
BLANK = {"light": "#FFFFFF", "dark": "#15171B"}
# Of roles by the page's colours: black and dark blue would be lost on a dark page.
ROLE_COLOURS_ON = {
    "light": ROLE_COLOURS,
    "dark": {**ROLE_COLOURS, Role.BOS: "#FFFFFF", Role.MEMORY: "#F07A2B", Role.TEXT: "#3D8FD6", Role.PAD: "#8A8A8A"},
}
# In their order, as they are defined before they are used.
SCRIPTS = ("cells.js", "matrix.js", "text.js", "positions.js", "page.js")


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a page shows about the tokens along one side of a map; None: unknown.

    Args:
        texts: decoded tokens, [N].
        roles: values of `Role`, [N].
        positions: position IDs, [N], or [A, N] for A axes.
    """

    texts: Sequence[str] | None = None
    roles: ArrayLike | None = None
    positions: ArrayLike | None = None


def layout_page(layout: Layout, *, tokens: Sequence[str] | None = None, title: str | None = None) -> str:
    """The mask of a layout, in logical and in physical order, and its position IDs, as HTML.

    Tokens that are chosen in the text, or a row of the map, colour the tokens that they see. Pointing at a pair shows
    both tokens, their roles and position IDs, and whether the query sees the key. A pixel of several pairs has the
    colour of most visible keys among them; the fewer these are, the paler it is.

    Args:
        layout: of at most 4096 tokens.
        tokens: decoded tokens, as many as the layout has.
        title: heading; None is the layout's name.

    Raises:
        TypeError: if a token is no string.
        ValueError: if the layout has too many tokens, or `tokens` another number.
    """
    _check_count("layout_page", "a layout", len(layout))
    layout_tokens = Tokens(tokens, layout.roles, layout.positions)
    side = _side("layout_page", "tokens", layout_tokens, len(layout), physical_order(layout))
    mask = layout.dense_mask()
    words = {
        "title": title or layout.name or "layout",
        "caption": f"Which of {len(layout)} tokens sees which: each row is a token that looks, and the columns that "
        "are coloured in it are the tokens that it sees, in the colour of their role. "
        f"{mask.mean():.1%} of all pairs are seen.",
        "rows": "what the chosen tokens see",
        "columns": "what sees them",
    }
    return _html(
        words, np.where(mask, SHADES * (layout.roles + 1), 0).astype(np.uint8)[None, None], queries=side, keys=None,
        layers=[""], heads=[""], opens=0, palettes={theme: _role_palette(theme) for theme in BLANK}, shades=SHADES,
        mean=True, octave=0, ticks={},
    )  # fmt: skip


def attention_page(
    weights: ArrayLike,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
    queries: Tokens | None = None,
    keys: Tokens | None = None,
    title: str = "Attention",
) -> str:
    """Attention weights as HTML: a map, or that of each layer and head, by sliders.

    Tokens that are chosen in the text, or a row of the map, colour the tokens that they look at; or those that look at
    them. Pointing at a weight shows it, to 3 %, and both tokens with their roles and position IDs. Colours are
    logarithmic from 1e-4 to 1, and those of the page at 0; a pixel of several weights has the colour of the largest.
    The page opens at the layer whose queries look most at one token farther back than the previous one, the first token
    apart. The file has a byte a weight, layers x heads x Nq x Nk, before compression.

    Args:
        weights: [Nq, Nk] or [layers, heads, Nq, Nk], 0 to 1, and 0 where a query does not see a key. At most 4096
            queries and keys, and 4 x 4096 x 4096 weights in all.
        layers, heads: their names, such as "3" and "mean of 9"; None: their numbers from 0.
        queries, keys: their tokens; `keys` None is `queries` if there are as many of both.
        title: heading.

    Raises:
        TypeError: if a token is no string.
        ValueError: for other weights, too many weights, or another number of names, tokens, roles or positions.
    """
    maps = np.asarray(weights)
    if maps.ndim not in (2, 4) or 0 in maps.shape:
        raise ValueError(
            f"attention_page: expected weights [Nq, Nk] or [layers, heads, Nq, Nk], got shape {list(maps.shape)}"
        )
    maps = maps.reshape((-1, 1, *maps.shape)[-4:])
    rows, width = maps.shape[2:]
    _check_count("attention_page", "weights", max(rows, width))
    if maps.size > MOST_CELLS:
        raise ValueError(
            f"attention_page: expected at most {MOST_CELLS} weights, got {maps.shape[0]} layers x {maps.shape[1]} "
            f"heads of {rows} x {width}"
        )
    query_side = _side("attention_page", "queries", queries or Tokens(), rows)
    self_attention = rows == width and (keys is None or keys is queries)
    key_side = None if self_attention else _side("attention_page", "keys", keys or Tokens(), width)
    cells = np.empty(maps.shape, np.uint8)
    for place in np.ndindex(*maps.shape[:2]):
        cells[place] = _levels(maps[place].astype(np.float32, copy=False))
    words = {
        "title": title,
        "caption": "Where attention goes: each row is a token that looks, each column a token that it may look at; "
        f"colours say how much of its attention goes there, by powers of ten ({rows} x {width} tokens).",
        "rows": "what the chosen tokens look at",
        "columns": "what looks at them",
    }
    return _html(
        words, cells, queries=query_side, keys=key_side, layers=_names("layers", layers, maps.shape[0]),
        heads=_names("heads", heads, maps.shape[1]), opens=int(np.argmax([_looks_back(layer[0]) for layer in maps])),
        palettes={theme: _weight_palette(theme) for theme in BLANK}, shades=255, mean=False, octave=OCTAVE,
        ticks={f"{100 * weight:g} %": _level(weight) for weight in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)},
    )  # fmt: skip


def _html(words: dict[str, str], cells: NDArray[np.uint8], **data: Any) -> str:
    """A page.

    Args:
        words: its title and caption, and by what `rows` and `columns` colour the text.
        cells: uint8 [layers, heads, Nq, Nk].
        data: what the scripts read: queries and keys, see `_side`, keys None if they are the queries; names of the
            layers and heads, and the layer that `opens`; palettes, colours of the cells from 0, on "light" and "dark"
            pages. A cell is 0 or shades * group + shade, with a shade from 1: seen from afar several cells are one, the
            largest, or with `mean` the group of the one with the largest shade, with the mean of their shades. With an
            octave, a cell is 0, or 255 + octave * log2(weight). ticks: {label: cell} of the colour bar.
    """
    maps = [gzip.compress(one.tobytes(), 6, mtime=0) for one in cells.reshape(-1, *cells.shape[2:])]
    data["maps"] = [b64encode(one).decode() for one in maps]
    data["role_colours"] = {theme: [colours[role] for role in Role] for theme, colours in ROLE_COLOURS_ON.items()}
    script = '"use strict";\n' + "\n".join(map(file_of, SCRIPTS))
    sides = [side for side in (data["queries"], data["keys"]) if side is not None]
    present = [role for role in Role if any(role in (side["roles"] or ()) for side in sides)]
    names = [f'<span><b style="background:var(--role{role:d})"></b>{role.name}</span>' for role in present]
    light, dark = ROLE_COLOURS_ON["light"], ROLE_COLOURS_ON["dark"]
    variables = " ".join(f"--role{role:d}: light-dark({light[role]}, {dark[role]});" for role in Role)
    words = words | {"picture": f"Map of queries and keys. {words['caption']}"}
    parts = {
        **{name: escape(legible(text)) for name, text in words.items()},
        "hash": b64encode(sha256(script.encode()).digest()).decode(),
        "style": f"{file_of('theme.css')}{file_of('page.css')}:root {{ {variables} }}",
        "theme": file_of("theme.html"),
        "legend": "Roles of tokens, below the text and along both sides: " + " ".join(names) if names else "",
        # A script element ends where its text says so; nothing else in it is markup.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda part: parts[part[1]], file_of("page.html"))


def _looks_back(weights: NDArray[Any]) -> float:
    """The mean over queries of the largest weight that is neither on the first token nor on the last two up to it."""
    rows, width = weights.shape
    before = np.tri(rows, width, width - rows - 2, bool)
    return float(np.where(before, weights, 0)[:, 1:].max(1, initial=0).mean())


def _names(name: str, names: Sequence[str] | None, count: int) -> list[str]:
    if names is None:
        return [str(number) for number in range(count)]
    if len(names) != count:
        raise ValueError(f"attention_page: expected {count} names of {name}, got {len(names)}")
    return [legible(text) for text in names]


def _weight_palette(theme: str) -> list[str]:
    """From the page's colour, for 0, to the one farthest from it."""
    shades = np.clip((np.arange(1, 256) - _level(LIGHTEST)) / (255 - _level(LIGHTEST)), 0, 1)
    # The first and last tenth of the map hardly differ from white and from black pages.
    ramp = colormaps["magma"](1 - 0.9 * shades - 0.02 if theme == "light" else 0.12 + 0.88 * shades)
    return [BLANK[theme], *map(to_hex, ramp)]


def _role_palette(theme: str) -> list[str]:
    """For each role SHADES mixtures of the page's colour and its own."""
    palette = [BLANK[theme]]
    for role in Role:
        colour = ROLE_COLOURS_ON[theme][role]
        palette += [_mixed(BLANK[theme], colour, (shade / SHADES) ** 0.5) for shade in range(1, SHADES + 1)]
    return palette


def _mixed(start: str, end: str, amount: float) -> str:
    """A mixture of two colours: 0 is the first, 1 the second."""
    red, green, blue = (one + amount * (other - one) for one, other in zip(to_rgb(start), to_rgb(end), strict=True))
    return to_hex((red, green, blue))


def _level(weight: float) -> float:
    return float(255 + OCTAVE * np.log2(weight))


def _levels(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    # Rows of low precision may sum to a little more than 1.
    if not ((weights >= 0) & (weights <= 1.01)).all():
        raise ValueError(f"attention_page: expected weights from 0 to 1, got {weights.min():g} to {weights.max():g}")
    with np.errstate(divide="ignore"):
        levels = np.clip(np.rint(255 + OCTAVE * np.log2(weights)), 1, 255)
    return np.where(weights > 0, levels, 0).astype(np.uint8)


def _check_count(function: str, name: str, count: int) -> None:
    if count > MOST_TOKENS:
        raise ValueError(f"{function}: expected {name} of at most {MOST_TOKENS} tokens, got {count}; show a part of it")


def _side(
    function: str, name: str, tokens: Tokens, count: int, physical: NDArray[np.int64] | None = None
) -> dict[str, Any]:
    """The tokens along one side, in logical order, as the scripts read them.

    `labels` are what the box beside the mouse says of each token, `names` each in a few characters, for sentences;
    `texts` legible tokens, None: numbers stand in the text instead; `physical` the token at each place of the physical
    order.
    """
    parts: list[Iterable[str]] = [(f"#{place}" for place in range(count))]
    texts = roles = positions = None
    if tokens.texts is not None:
        if isinstance(tokens.texts, str) or not all(isinstance(text, str) for text in tokens.texts):
            raise TypeError(f"{function}: expected {name} to hold strings, one a token")
        if len(tokens.texts) != count:
            raise ValueError(f"{function}: expected {count} {name}, got {len(tokens.texts)}")
        texts = [legible(text) for text in tokens.texts]
        parts.append(f"“{text}”" for text in texts)
    if tokens.roles is not None:
        roles = np.asarray(tokens.roles)
        if roles.shape != (count,) or not np.isin(roles, list(Role)).all():
            raise ValueError(f"{function}: expected roles of {name}, [{count}] values of Role, got {tokens.roles!r}")
        physical = np.argsort(roles, kind="stable") if physical is None else physical
        parts.append(Role(role).name for role in roles)
    if tokens.positions is not None:
        positions = np.atleast_2d(tokens.positions)
        if positions.shape[1:] != (count,):
            raise ValueError(f"{function}: expected positions of {name}, [{count}], got shape {list(positions.shape)}")
        parts.append("position " + ", ".join(f"{id:.12g}" for id in ids) for ids in positions.T)
    return dict(
        labels=list(map(" ".join, zip(*parts, strict=True))),
        names=[f"#{place}" if texts is None else f"#{place} “{texts[place]}”" for place in range(count)],
        texts=texts,
        roles=None if roles is None else roles.astype(int).tolist(),
        positions=None if positions is None else positions.astype(float).tolist(),
        physical=None if roles is None or physical is None else physical.tolist(),
    )
