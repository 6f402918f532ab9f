"""The attention masks and position IDs of several layouts side by side; by default, of all methods."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gistkit import layouts
from gistkit.common.checks import at_least, one_of
from gistkit.layouts import ALL, CAUSAL, Layout, Role
from gistkit.viz.layout import check_size, draw_mask, draw_positions, role_legend
from gistkit.viz.style import Picture

CONTEXT, RATIO, TEXT = 12, 3, 5


def draw_gallery(
    named: Mapping[str, Layout] | None = None,
    *,
    order: str = "logical",
    positions: bool = True,
    columns: int = 4,
) -> Figure:
    """Draws the masks of several layouts side by side: one row per query, one column per key.

    The picture of all methods in the README: `draw_gallery().savefig("docs/gallery.png", dpi=160)`.

    Args:
        named: layouts of at most 1024 tokens by name, at least one; None: those of all methods, see `all_methods`.
        order: "logical" or "physical", as in `Layout.dense_mask`.
        positions: whether to draw position IDs, from the lowest to the highest, in a panel below each mask.
        columns: masks in a row, at least 1.
    """
    named = all_methods() if named is None else named
    if not named:
        raise ValueError("draw_gallery: expected at least one layout, got none")
    one_of("draw_gallery", "order", order, ("logical", "physical"))
    columns = min(at_least("draw_gallery", "columns", columns, 1), len(named))
    rows = -(-len(named) // columns)
    below = " Below it: position IDs." if positions else ""
    note = fill(
        f"A row is a query, a column a key; a key that is seen has the colour of its role.{below}", 36 * columns
    )
    # A line of the legend takes 0.2 inches: narrow pictures need several.
    legend = 0.2 * (note.count("\n") + 6 // columns)
    height = (3.25 if positions else 2.65) * rows + 0.3 + legend
    figure = Picture(figsize=(2.5 * columns, height), layout="constrained", dpi=120)
    for place, (name, layout) in enumerate(named.items(), start=1):
        check_size("draw_gallery", layout)
        axes = figure.add_subplot(rows, columns, place)
        draw_mask(axes, layout, order)
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
        axes.set_title(name, fontsize=11, parse_math=False)
        if positions:
            _positions_below(axes, layout, order)
    role_legend(figure, note, 2 * columns)
    return figure


def _positions_below(mask: Axes, layout: Layout, order: str) -> None:
    """A panel as wide as the mask, column below column."""
    axes = mask.inset_axes((0, -0.27, 1, 0.22))
    draw_positions(axes, layout, order, size=13)
    low, high = float(layout.positions.min()), float(layout.positions.max())
    room = max(0.12 * (high - low), 0.5)
    axes.set(xlim=mask.get_xlim(), ylim=(low - room, high + room), xticks=[], yticks=sorted({low, high}))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.tick_params("y", labelsize=7, length=2, pad=1)
    axes.grid(visible=False)


def all_methods() -> dict[str, Layout]:
    """A small layout of every method, by a title: what each builder of `gistkit.layouts` makes."""
    nuggets = np.zeros(1 + CONTEXT + TEXT, dtype=bool)
    nuggets[[3, 5, 8, 12]] = True
    return {
        "Causal": layouts.causal(1 + CONTEXT + TEXT),
        "Full context": layouts.full_context(CONTEXT, TEXT),
        "No context": layouts.no_context(CONTEXT),
        "Gist": layouts.gist(CONTEXT, RATIO, TEXT),
        "AvgPool": layouts.avgpool(CONTEXT, RATIO, TEXT),
        "GistPool, 2 windows": layouts.gistpool(CONTEXT, RATIO, TEXT, windows=2),
        "Beacon, 2 chunks": layouts.beacon(CONTEXT, RATIO, TEXT, segment=6),
        "Dodo, fixed resolution": _fixed_resolution(nuggets),
        "Dodo, mixed resolution": layouts.dodo(nuggets, 6, bos=True),
        "VoCo, 2 images, EPL": layouts.voco(6, 2, TEXT, before=1, images=2),
        "ICAE encoder, 2 chunks, EPL": layouts.icae_encoder(CONTEXT, 6, 2),
        "SAC encoder, 2 chunks": layouts.sac(CONTEXT, 6, RATIO),
        "ICAE decoder, 2 chunks, EPL": layouts.decoder(CONTEXT, 6, 2),
        "ICAE decoder, 1 chunk, DPL": layouts.decoder(CONTEXT, CONTEXT, 4, positions="dpl"),
    }


def _fixed_resolution(nuggets: np.ndarray) -> Layout:
    """[BOS][context][text]: text sees only the nuggets of the context (Dodo, Section 2.1)."""
    roles = np.where(nuggets, Role.MEMORY, Role.CONTEXT)
    roles[0], roles[-TEXT:] = Role.BOS, Role.TEXT
    past = {Role.BOS: ALL, Role.CONTEXT: CAUSAL, Role.MEMORY: CAUSAL}
    sees = {
        Role.BOS: {Role.BOS: ALL},
        Role.CONTEXT: past,
        Role.MEMORY: past,
        Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
    }
    return Layout(roles=roles.astype(np.uint8), sees=sees, name="Dodo, fixed resolution")
