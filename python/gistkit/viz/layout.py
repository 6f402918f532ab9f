"""Pictures of layouts: who sees whom, in logical and in physical order, and the position ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from gistkit.layouts._checks import at_least
from gistkit.layouts.oracle import physical_order
from gistkit.layouts.relations import Role
from gistkit.viz.style import COLOURS, Picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from gistkit.layouts.layout import Layout

# Neighbouring roles differ in grey too.
ROLE_COLOURS = {
    Role.BOS: COLOURS["black"],
    Role.CONTEXT: COLOURS["sky"],
    Role.MEMORY: COLOURS["red"],
    Role.TASK: COLOURS["yellow"],
    Role.TEXT: COLOURS["blue"],
    Role.PAD: COLOURS["grey"],
}
MARKERS = {Role.BOS: "s", Role.CONTEXT: "o", Role.MEMORY: "^", Role.TASK: "D", Role.TEXT: "v", Role.PAD: "P"}
MOST_TOKENS = 1024


def draw(layout: Layout, *, window: int | None = None, title: str | None = None) -> Figure:
    """A figure with the mask of a layout in logical and in physical order, and its position ids.

    Args:
        layout: of at most 1024 tokens.
        window: sliding window, as in `Layout.compile`.
        title: heading; None is the layout's name.
    """
    count = _checked_count("draw", layout)
    figure = Picture(figsize=(11, 8.2), layout="constrained", dpi=120)
    figure.suptitle(layout.name if title is None else title, fontsize=14)
    grid = figure.add_gridspec(2, 2, height_ratios=[2.4, 1])
    orders = {"Logical order": np.arange(count), "Physical order (grouped by role)": physical_order(layout)}
    for column, (name, order) in enumerate(orders.items()):
        axes = figure.add_subplot(grid[0, column])
        mask = layout.dense_mask("physical" if column else "logical", window)
        _draw_mask(axes, mask, layout.roles[order], layout.documents[order])
        axes.set_title(name, fontsize=11)
    _draw_positions(figure.add_subplot(grid[1, :]), layout)
    _draw_legend(figure, [layout])
    return figure


def draw_masks(named: Mapping[str, Layout], *, order: str = "logical", columns: int = 3) -> Figure:
    """A figure with the masks of several layouts side by side, each under its name.

    Args:
        named: layouts of at most 1024 tokens, at least one.
        order: "logical" or "physical", as in `Layout.dense_mask`.
        columns: masks in a row, at least 1.
    """
    if not named:
        raise ValueError("draw_masks: expected at least one layout, got none")
    columns = min(at_least("draw_masks", "columns", columns, 1), len(named))
    rows = -(-len(named) // columns)
    figure = Picture(figsize=(3.7 * columns, 3.9 * rows + 0.5), layout="constrained", dpi=120)
    for place, (name, layout) in enumerate(named.items(), start=1):
        count = _checked_count("draw_masks", layout)
        chosen = physical_order(layout) if order == "physical" else np.arange(count)
        axes = figure.add_subplot(rows, columns, place)
        _draw_mask(axes, layout.dense_mask(order), layout.roles[chosen], layout.documents[chosen])
        axes.set_title(name, fontsize=11)
    _draw_legend(figure, list(named.values()))
    return figure


def _checked_count(function: str, layout: Layout) -> int:
    count = len(layout)
    if count > MOST_TOKENS:
        raise ValueError(
            f"{function}: expected a layout of at most {MOST_TOKENS} tokens, got {count}; draw a smaller one"
        )
    return count


def _draw_legend(figure: Figure, layouts: Sequence[Layout]) -> None:
    """The roles that any of the layouts has, below the figure."""
    handles = [
        Line2D(
            [], [], color=ROLE_COLOURS[role], marker=MARKERS[role], label=role.name, linestyle="", markersize=9,
            markeredgecolor="black", markeredgewidth=0.5,
        )
        for role in Role
        if any((layout.roles == role).any() for layout in layouts)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _draw_mask(axes: Axes, mask: NDArray[np.bool_], roles: NDArray[np.uint8], documents: NDArray[np.int32]) -> None:
    count = len(roles)
    # Seen pairs take the colour of the key's role; 0 is unseen.
    image = np.where(mask, roles[None, :] + 1, 0)
    palette = ListedColormap(["#FFFFFF", *(ROLE_COLOURS[role] for role in Role)])
    axes.imshow(image, cmap=palette, vmin=-0.5, vmax=len(Role) + 0.5, interpolation="nearest")
    if count <= 64:
        axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#DDDDDD", linewidth=0.4)
        axes.tick_params(which="minor", length=0)
    # A strip along each side shows the role of every query and key.
    strip = palette(roles[None, :].astype(int) + 1)
    width = max(1.0, count / 40)
    axes.imshow(strip, extent=(-0.5, count - 0.5, -0.7, -0.7 - width), interpolation="nearest")
    axes.imshow(strip.transpose(1, 0, 2)[::-1], extent=(-0.7 - width, -0.7, -0.5, count - 0.5), interpolation="nearest")
    for edge in np.flatnonzero(np.diff(documents)) + 0.5:
        axes.axhline(edge, color="black", linewidth=0.8)
        axes.axvline(edge, color="black", linewidth=0.8)
    axes.set_xlim(-0.8 - width, count - 0.5)
    axes.set_ylim(count - 0.5, -0.8 - width)
    ticks = [tick for tick in MaxNLocator(6, integer=True).tick_values(0, count - 1) if 0 <= tick < count]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_positions(axes: Axes, layout: Layout) -> None:
    positions = np.atleast_2d(layout.positions)
    for role in Role:
        mine = np.flatnonzero(layout.roles == role)
        for axis in range(len(positions)):
            axes.scatter(
                mine, positions[axis, mine], s=22, marker=MARKERS[role], color=ROLE_COLOURS[role], edgecolor="black",
                linewidth=0.4,
            )  # fmt: skip
    axes.set_xlabel("token, in logical order")
    axes.set_ylabel("position id")
    axes.set_xlim(-1, len(layout))
    axes.grid(color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
