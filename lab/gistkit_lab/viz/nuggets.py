"""Pictures of nuggets: their token types, and attention to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike

from gistkit.common.checks import at_least
from gistkit.viz.legible import legible
from gistkit.viz.style import COLOURS, FigureOrAxes, axes_of, tidy
from gistkit_lab.evaluate.token_types import check_selected
from gistkit_lab.viz.lines import legend_beside

MOST_LABELS = 48


def draw_token_types(
    types: Sequence[tuple[str, float, float]], *, top: int = 10, title: str = "", ax: Axes | None = None
) -> FigureOrAxes:
    """How often the most selected token types are selected, beside how often they occur.

    Args:
        types: (token, share of the nuggets, share of all tokens), 0 to 1, the most often selected first, as
            `gistkit_lab.evaluate.token_types` counts them; at least one.
        top: number of token types to draw, at least 1. Spaces are drawn as ␣, line breaks as ↵ and tabs as ⇥.
        title: a heading.
        ax: axes to draw into.

    Paper: Dodo, Figure 5.
    """
    if not types:
        raise ValueError("draw_token_types: expected at least one token type, got none")
    drawn_types = types[: at_least("draw_token_types", "top", top, 1)]
    result, axes = axes_of(ax, (7.0, 1.5 + 0.38 * len(drawn_types)))
    rows = np.arange(len(drawn_types))
    nugget_shares, text_shares = [share for _, share, _ in drawn_types], [share for _, _, share in drawn_types]
    axes.barh(rows - 0.19, nugget_shares, 0.36, color=COLOURS["green"], label="of nuggets")
    axes.barh(rows + 0.19, text_shares, 0.36, color="#CCCCCC", edgecolor="#777777", hatch="////", label="of all tokens")
    names = [legible(token).replace(" ", "␣") for token, _, _ in drawn_types]
    axes.set_yticks(rows, names, family="monospace", fontsize=11, parse_math=False)
    axes.set(xlabel="share", ylim=(len(drawn_types) - 0.5, -0.5), xlim=(0, None))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.set_title(
        title or f"The first {len(drawn_types)} token types: {sum(nugget_shares):.0%} of the nuggets", loc="left"
    )
    legend_beside(axes)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return result


def draw_attention_to_nuggets(
    weights: ArrayLike,
    selected: ArrayLike,
    *,
    keys: Sequence[str] | Sequence[int] | None = None,
    queries: Sequence[str] | Sequence[int] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> FigureOrAxes:
    """Attention weights of later tokens over nuggets and recent tokens: a row a query, nuggets' columns marked.

    The darkest colour starts at the 98% quantile of the weights above 0.

    Args:
        weights: [queries, keys], none negative; 0 where a query does not see a key.
        selected: bool [keys], True at the nuggets.
        keys, queries: the text or the position of each; None: its place in `weights`.
        title: a heading.
        ax: axes to draw into.

    Paper: Dodo, Equation 11.
    """
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"draw_attention_to_nuggets: expected weights [queries, keys], got {list(values.shape)}")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError("draw_attention_to_nuggets: expected finite weights >= 0, got others")
    is_nugget = check_selected("draw_attention_to_nuggets", selected, values.shape[1])
    rows, columns = values.shape
    width, height = (min(max(low, 0.19 * count), 0.19 * MOST_LABELS) for count, low in ((columns, 2.8), (rows, 1.6)))
    result, axes = axes_of(ax, (width + 2.4, height + 1.5))
    # Below the weights, so that it leaves their colours as they are.
    for nugget in np.flatnonzero(is_nugget):
        axes.axvspan(nugget - 0.5, nugget + 0.5, color=COLOURS["green"], alpha=0.22, linewidth=0, zorder=-1)
    visible = np.ma.masked_equal(values, 0)
    limit = float(np.quantile(visible.compressed(), 0.98)) if visible.count() else 1.0
    image = axes.imshow(visible, aspect="auto", cmap="magma_r", vmin=0, vmax=limit, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="attention weight", extend="max" if values.max() > limit else "neither")
    if is_nugget.any():
        size = min(7.0, max(3.0, 400 / columns))
        # As far above the weights, and below the title, in a tall picture as in a flat one.
        above = axes.get_xaxis_transform() + ScaledTranslation(0, 6 / 72, axes.figure.dpi_scale_trans)
        axes.plot(
            np.flatnonzero(is_nugget), np.ones(is_nugget.sum()), transform=above, clip_on=False,
            color=COLOURS["green"], marker="v", markersize=size, linestyle="",
        )  # fmt: skip
    _name(axes.xaxis, "keys", keys, columns)
    _name(axes.yaxis, "queries", queries, rows)
    if keys is not None and isinstance(keys[0], str):
        axes.tick_params(axis="x", rotation=90)
    key = "key (▼ nugget)" if is_nugget.any() else "key"
    axes.set(xlabel=key, ylabel="query", xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.set_title(title or "Attention to nuggets and to recent tokens", loc="left", pad=14, parse_math=False)
    return result


def _name(axis: Axis, name: str, labels: Sequence[str] | Sequence[int] | None, count: int) -> None:
    """Ticks with the labels: all texts if they fit, else some."""
    labels = range(count) if labels is None else labels
    if len(labels) != count:
        raise ValueError(f"draw_attention_to_nuggets: expected {count} {name}, as weights has, got {len(labels)}")
    all_labels = count <= MOST_LABELS and isinstance(labels[0], str)
    ticks = (
        range(count) if all_labels else [int(tick) for tick in MaxNLocator(8, integer=True).tick_values(0, count - 1)]
    )
    shown_ticks = [tick for tick in ticks if 0 <= tick < count]
    names = [legible(str(labels[tick])).replace(" ", "␣") for tick in shown_ticks]
    axis.set_ticks(shown_ticks, names, fontsize=8, family="monospace" if all_labels else None, parse_math=False)
