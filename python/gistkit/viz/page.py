"""Pages of layouts and attention maps: one HTML file each, which a browser shows without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.palettes import Magma256
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import ArrayLike, NDArray

from gistkit.layouts.layout import Layout, physical_order
from gistkit.layouts.relations import Role
from gistkit.viz.flow import legible
from gistkit.viz.layout import ROLE_COLOURS
from gistkit.viz.matrix_page import MARKERS, MatrixPage

__all__ = ["MOST_CELLS", "MOST_TOKENS", "Tokens", "attention_page", "layout_page"]
MOST_TOKENS = 4096
MOST_CELLS = 4 * MOST_TOKENS**2
# A cell of a layout is 0, or SHADES * role + the share of its pairs that are seen, 1 to SHADES.
SHADES = 42
# A cell of an attention map is 0, or 255 + OCTAVE * log2(weight), 1 to 255: at most 2**(1/24) off.
OCTAVE = 12
LEAST = 2.0 ** ((1.5 - 255) / OCTAVE)
# Weights below have the lightest colour.
LIGHTEST = 1e-5
WEIGHT = f"""\
if (cell < 2) return cell ? "below {LEAST:.1e}" : "0";
const weight = 2 ** ((cell - 255) / {OCTAVE});
return weight < 0.001 ? weight.toExponential(2) : weight.toPrecision(3);"""


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a page shows about the tokens along one side of a map; None: unknown.

    Args:
        texts: decoded tokens, [N].
        roles: values of `Role`, [N].
        positions: position ids, [N], or [A, N] for A axes.
    """

    texts: Sequence[str] | None = None
    roles: ArrayLike | None = None
    positions: ArrayLike | None = None


def layout_page(layout: Layout, *, tokens: Sequence[str] | None = None, title: str | None = None) -> str:
    """The mask of a layout, in logical and in physical order, and its position ids, as HTML.

    Pointing at a pair shows both tokens, their roles and position ids, and whether the query sees the key. A pixel of
    several pairs has the colour of most visible keys among them; the fewer these are, the paler it is.

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
    palette = ["#FFFFFF"]
    for role in Role:
        palette += [_towards(ROLE_COLOURS[role], (shade / SHADES) ** 0.5) for shade in range(1, SHADES + 1)]
    return MatrixPage(
        title=title or layout.name or "layout",
        notes=f"{len(layout)} tokens; {mask.mean():.1%} of the pairs are seen, in the colour of the key.",
        queries=side,
        keys=side,
        cells={"mask": np.where(mask, SHADES * (layout.roles + 1), 0).astype(np.uint8)},
        palette=palette,
        shades=SHADES,
        mean=True,
        value=("seen", 'return cell ? "yes" : "no"'),
    ).html()


def attention_page(
    weights: ArrayLike | Mapping[str, ArrayLike],
    *,
    queries: Tokens | None = None,
    keys: Tokens | None = None,
    title: str = "Attention",
) -> str:
    """Attention weights as HTML: a map, or several to choose from.

    Pointing at a weight shows it, to 3 %, and both tokens with their roles and position ids. Colours are logarithmic
    from 1e-5 to 1, and white at 0; a pixel of several weights has the colour of the largest.

    Args:
        weights: [Nq, Nk], 0 to 1, and 0 where a query does not see a key; or {name: such weights}, all of one shape. At
            most 4096 queries and keys, and 4 x 4096 x 4096 weights in all.
        queries, keys: their tokens; `keys` None is `queries` if there are as many of both.
        title: heading.

    Raises:
        TypeError: if a token is no string.
        ValueError: for other weights, too many weights, or another number of tokens, roles or positions.
    """
    named_weights = weights if isinstance(weights, Mapping) else {"weights": weights}
    maps = {name: np.asarray(weight_map, np.float32) for name, weight_map in named_weights.items()}
    shapes = {weight_map.shape for weight_map in maps.values()}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 2 or 0 in shape:
        raise ValueError(f"attention_page: expected weights [Nq, Nk], all of one shape, got shapes {sorted(shapes)}")
    rows, width = shape
    _check_count("attention_page", "weights", max(shape))
    if len(maps) * rows * width > MOST_CELLS:
        raise ValueError(
            f"attention_page: expected at most {MOST_CELLS} weights, got {len(maps)} maps of {rows} x {width}"
        )
    query_side = _side("attention_page", "queries", queries or Tokens(), rows)
    self_attention = rows == width and (keys is None or keys is queries)
    key_side = query_side if self_attention else _side("attention_page", "keys", keys or Tokens(), width)
    darkest, lightest = 255.0, _level(LIGHTEST)
    shades = np.clip((np.arange(1, 256) - lightest) / (darkest - lightest), 0, 1)
    return MatrixPage(
        title=title,
        notes=f"{rows} queries, {width} keys; weights to 3 %, white where there is none.",
        queries=query_side,
        keys=key_side,
        cells={name: _levels(weight_map) for name, weight_map in maps.items()},
        palette=["#FFFFFF", *(Magma256[255 - round(255 * shade)] for shade in shades)],
        shades=255,
        mean=False,
        value=("weight", WEIGHT),
        ticks={_level(weight): f"{weight:g}" for weight in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)},
    ).html()


def _level(weight: float) -> float:
    return float(255 + OCTAVE * np.log2(weight))


def _levels(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    # Rows of low precision may sum to a little more than 1.
    if not ((weights >= 0) & (weights <= 1.01)).all():
        raise ValueError(f"attention_page: expected weights from 0 to 1, got {weights.min():g} to {weights.max():g}")
    with np.errstate(divide="ignore"):
        levels = np.clip(np.rint(255 + OCTAVE * np.log2(weights)), 1, 255)
    return np.where(weights > 0, levels, 0).astype(np.uint8)


def _towards(colour: str, amount: float) -> str:
    """A mixture of white, 0, and the colour, 1."""
    red, green, blue = (1 - amount * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _check_count(function: str, name: str, count: int) -> None:
    if count > MOST_TOKENS:
        raise ValueError(f"{function}: expected {name} of at most {MOST_TOKENS} tokens, got {count}; show a part of it")


def _side(
    function: str, name: str, tokens: Tokens, count: int, physical: NDArray[np.int64] | None = None
) -> ColumnDataSource:
    """The tokens along one side, as `MatrixPage` takes them."""
    columns: dict[str, Any] = {"place": np.arange(count, dtype=np.int32)}
    parts: list[Iterable[str]] = [(f"#{place}" for place in range(count))]
    texts = tokens.texts
    if texts is not None:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{function}: expected {name} to hold strings, one a token")
        if len(texts) != count:
            raise ValueError(f"{function}: expected {count} {name}, got {len(texts)}")
        parts.append(f"“{legible(text)}”" for text in texts)
    if tokens.roles is not None:
        roles = np.asarray(tokens.roles)
        if roles.shape != (count,) or not np.isin(roles, list(Role)).all():
            raise ValueError(f"{function}: expected roles of {name}, [{count}] values of Role, got {tokens.roles!r}")
        physical = np.argsort(roles, kind="stable") if physical is None else physical
        columns["physical"] = physical.astype(np.int32)
        columns["colour"] = [ROLE_COLOURS[Role(role)] for role in roles]
        columns["marker"] = [MARKERS[Role(role)] for role in roles]
        parts.append(Role(role).name for role in roles)
    if tokens.positions is not None:
        positions = np.atleast_2d(tokens.positions)
        if positions.shape[1:] != (count,):
            raise ValueError(f"{function}: expected positions of {name}, [{count}], got shape {list(positions.shape)}")
        columns |= {f"position{axis}": ids.astype(np.float64) for axis, ids in enumerate(positions)}
        parts.append("position " + ", ".join(f"{id:.12g}" for id in ids) for ids in positions.T)
    return ColumnDataSource({**columns, "label": list(map(" ".join, zip(*parts, strict=True)))})
