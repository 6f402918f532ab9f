"""The attention masks and position IDs of several layouts side by side; by default, of all methods."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gistkit.common.checks import at_least
from gistkit.layouts import ALL, BUILDERS, CAUSAL, Layout, Role
from gistkit.layouts.builders import EXAMPLES
from gistkit.viz.layout import check_size, draw_mask, draw_positions, role_legend
from gistkit.viz.style import Picture


def draw_gallery(named: Mapping[str, Layout] | None = None, *, columns: int = 4) -> Figure:
    """Draws the masks of several layouts side by side, in logical order, with their position IDs below.

    A row of a mask is a query, a column a key.

    The picture of all methods in the README: `draw_gallery().savefig("docs/gallery.png", dpi=160)`.

    Args:
        named: layouts of at most 1024 tokens by name, at least one; None: those of all methods, see `all_methods`.
        columns: masks in a row, at least 1.
    """
    named = all_methods() if named is None else named
    if not named:
        raise ValueError("draw_gallery: expected at least one layout, got none")
    columns = min(at_least("draw_gallery", "columns", columns, 1), len(named))
    rows = -(-len(named) // columns)
    text = "A row is a query, a column a key; a key that is seen has the colour of its role. Below it: position IDs."
    note = fill(text, 36 * columns)
    # A line of the legend takes 0.2 inches: narrow pictures need several.
    legend = 0.2 * (note.count("\n") + 6 // columns)
    figure = Picture(figsize=(2.5 * columns, 3.25 * rows + 0.3 + legend), layout="constrained", dpi=120)
    for place, (name, layout) in enumerate(named.items(), start=1):
        check_size("draw_gallery", layout)
        axes = figure.add_subplot(rows, columns, place)
        draw_mask(axes, layout, "logical")
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
        axes.set_title(name, fontsize=11, parse_math=False)
        _positions_below(axes, layout)
    role_legend(figure, note, 2 * columns)
    return figure


def _positions_below(mask: Axes, layout: Layout) -> None:
    """A panel as wide as the mask, column below column."""
    axes = mask.inset_axes((0, -0.27, 1, 0.22))
    draw_positions(axes, layout, "logical", size=13)
    low, high = float(layout.positions.min()), float(layout.positions.max())
    room = max(0.12 * (high - low), 0.5)
    axes.set(xlim=mask.get_xlim(), ylim=(low - room, high + room), xticks=[], yticks=sorted({low, high}))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.tick_params("y", labelsize=7, length=2, pad=1)
    axes.grid(visible=False)


def all_methods() -> dict[str, Layout]:
    """A small layout of every method, by a title: the examples of all builders, those without memory tokens first."""
    named = {title: BUILDERS[name](**arguments) for title, (name, arguments) in EXAMPLES.items()}
    named |= {"Dodo, fixed resolution": _fixed_resolution(named["Dodo, mixed resolution"].roles)}
    return dict(sorted(named.items(), key=lambda item: (Role.MEMORY in item[1].roles, item[0])))


def _fixed_resolution(roles: NDArray[np.uint8]) -> Layout:
    """[BOS][context][text]: text, the last 5 tokens, sees only the nuggets of the context (Dodo, Section 2.1)."""
    roles = roles.copy()
    roles[-5:] = Role.TEXT
    past = {Role.BOS: ALL, Role.CONTEXT: CAUSAL, Role.MEMORY: CAUSAL}
    sees = {
        Role.BOS: {Role.BOS: ALL},
        Role.CONTEXT: past,
        Role.MEMORY: past,
        Role.TEXT: {Role.BOS: ALL, Role.MEMORY: ALL, Role.TEXT: CAUSAL},
    }
    return Layout(roles=roles, sees=sees, name="Dodo, fixed resolution")
