"""A map of queries and keys as one HTML file that a browser shows without a network: its text, zoom, pan, and hover.

The page's script is that of `browser/`, a file for each part.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gistkit.layouts.relations import Role
from gistkit.viz.browser import file_of
from gistkit.viz.layout import ROLE_COLOURS
from gistkit.viz.legible import legible

__all__ = ["ROLE_COLOURS_ON", "MatrixPage", "Side"]
# In their order, as they are defined before they are used.
SCRIPTS = ("cells.js", "matrix.js", "text.js", "positions.js", "page.js")
# Of roles by the page's colours: black and dark blue would be lost on a dark page.
ROLE_COLOURS_ON = {
    "light": ROLE_COLOURS,
    "dark": {**ROLE_COLOURS, Role.BOS: "#FFFFFF", Role.MEMORY: "#F07A2B", Role.TEXT: "#3D8FD6", Role.PAD: "#8A8A8A"},
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """The tokens along one side, in logical order.

    Args:
        labels: what the box beside the mouse says of each token.
        names: each token in a few characters, for sentences.
        texts: legible tokens; None: numbers stand in the text instead.
        roles: values of `Role`.
        positions: position ids, a list for each axis.
        physical: the token at each place of the physical order.
    """

    labels: Sequence[str]
    names: Sequence[str]
    texts: Sequence[str] | None = None
    roles: Sequence[int] | None = None
    positions: Sequence[Sequence[float]] | None = None
    physical: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class MatrixPage:
    """What a page shows.

    Args:
        title: heading.
        caption: what is drawn, in plain words, below the heading.
        hint: what the text is for; `rows` and `columns`: by what it may be coloured.
        queries, keys: the tokens along each side; keys None: the queries are the keys.
        cells: uint8 [layers, heads, Nq, Nk].
        layers, heads: their names; `opens`: the layer that is shown first, from 0.
        palettes: colours of the cells from 0, on "light" and on "dark" pages.
        shades, mean: a cell is 0 or shades * group + shade, with a shade from 1. Seen from afar several cells are one:
            the largest, or with `mean` the group of the one with the largest shade, with the mean of their shades.
        octave: a cell is 0, or 255 + octave * log2(weight); 0: cells above 0 are pairs that are seen.
        ticks: {label: cell} of the colour bar; empty: there is none.
    """

    title: str
    caption: str
    hint: str
    rows: str
    columns: str
    queries: Side
    keys: Side | None
    cells: NDArray[np.uint8]
    layers: Sequence[str]
    heads: Sequence[str]
    opens: int = 0
    palettes: Mapping[str, Sequence[str]]
    shades: int
    mean: bool
    octave: int = 0
    ticks: Mapping[str, float]

    def html(self) -> str:
        """The file."""
        maps = self.cells.reshape(-1, *self.cells.shape[2:])
        data = {
            "queries": asdict(self.queries),
            "keys": None if self.keys is None else asdict(self.keys),
            "maps": [b64encode(gzip.compress(one.tobytes(), 6, mtime=0)).decode() for one in maps],
            "layers": list(self.layers),
            "heads": list(self.heads),
            "opens": self.opens,
            "palettes": self.palettes,
            "role_colours": {theme: [colours[role] for role in Role] for theme, colours in ROLE_COLOURS_ON.items()},
            "shades": self.shades,
            "mean": self.mean,
            "octave": self.octave,
            "ticks": self.ticks,
        }
        script = '"use strict";\n' + "\n".join(map(file_of, SCRIPTS))
        words = {"title": self.title, "caption": self.caption, "hint": self.hint, "rows": self.rows}
        words |= {"columns": self.columns, "picture": f"Map of queries and keys. {self.caption}"}
        parts = {
            **{name: escape(legible(text)) for name, text in words.items()},
            "hash": b64encode(sha256(script.encode()).digest()).decode(),
            "style": file_of("theme.css") + file_of("page.css") + _role_variables(),
            "theme": file_of("theme.html"),
            "legend": self._legend(),
            # A script element ends where its text says so; nothing else in it is markup.
            "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
            "script": script,
        }
        return re.sub(r"\{\{(\w+)\}\}", lambda part: parts[part[1]], file_of("page.html"))

    def _legend(self) -> str:
        present = {role for side in (self.queries, self.keys) if side is not None for role in side.roles or ()}
        names = [
            f'<span><b style="background:var(--role{role:d})"></b>{role.name}</span>'
            for role in Role
            if role in present
        ]
        return "Roles of tokens, below the text and along both sides: " + " ".join(names) if names else ""


def _role_variables() -> str:
    light, dark = ROLE_COLOURS_ON["light"], ROLE_COLOURS_ON["dark"]
    pairs: list[Any] = [f"--role{role:d}: light-dark({light[role]}, {dark[role]});" for role in Role]
    return f":root {{ {' '.join(pairs)} }}"
