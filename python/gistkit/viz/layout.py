"""Pictures of layouts: the attention mask in logical and physical order, and the position IDs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from gistkit.common.checks import one_of
from gistkit.layouts.layout import physical_order
from gistkit.layouts.relations import Role
from gistkit.viz.style import COLOURS, Picture

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from gistkit.layouts.layout import Layout

# Okabe and Ito's hues, the sky paler and the blue darker than theirs: roles that meet in a mask differ in grey by a
# quarter of the way from black to white.
ROLE_COLOURS = {
    Role.BOS: COLOURS["black"],
    Role.CONTEXT: "#A8D8F5",
    Role.MEMORY: COLOURS["red"],
    Role.TASK: COLOURS["yellow"],
    Role.TEXT: "#00497A",
    Role.PAD: "#ABABAB",
}
MARKERS = {Role.BOS: "s", Role.CONTEXT: "o", Role.MEMORY: "^", Role.TASK: "D", Role.TEXT: "v", Role.PAD: "P"}
PALETTE = ListedColormap(["#FFFFFF", *(ROLE_COLOURS[role] for role in Role)])
ORDERS = {"logical": "Logical order", "physical": "Physical order (grouped by role)"}
MOST_TOKENS = 1024


def draw_layout(layout: Layout, *, order: str = "both", title: str | None = None) -> Figure:
    """Draws a layout's mask (rows: queries, columns: keys, coloured by the key's role) and its position IDs.

    Args:
        layout: of at most 1024 tokens.
        order: of the tokens, "logical", "physical" (grouped by role, as in `Layout.compile`) or "both", in a panel
            each. Position IDs are in logical order if both are shown.
        title: heading; None is the layout's name.
    """
    one_of("draw_layout", "order", order, ("both", *ORDERS))
    check_size("draw_layout", layout)
    orders = tuple(ORDERS) if order == "both" else (order,)
    figure = Picture(figsize=(5.5 * len(orders), 8.2), layout="constrained", dpi=120)
    figure.suptitle(layout.name if title is None else title, fontsize=14, parse_math=False)
    grid = figure.add_gridspec(2, len(orders), height_ratios=[2.4, 1])
    for column, name in enumerate(orders):
        axes = figure.add_subplot(grid[0, column])
        draw_mask(axes, layout, name)
        axes.set_title(ORDERS[name], fontsize=11)
    axes = figure.add_subplot(grid[1, :])
    draw_positions(axes, layout, orders[0])
    axes.set(xlabel=f"token, in {orders[0]} order", ylabel="position id")
    role_legend(figure)
    return figure


def check_size(function: str, layout: Layout) -> None:
    """Refuses a layout of more tokens than can be drawn."""
    if len(layout) > MOST_TOKENS:
        raise ValueError(
            f"{function}: expected a layout of at most {MOST_TOKENS} tokens, got {len(layout)}; draw a smaller one"
        )


def tokens_in(order: str, layout: Layout) -> NDArray[np.int64]:
    """The tokens [N] in "logical" or "physical" order."""
    return physical_order(layout) if order == "physical" else np.arange(len(layout))


def role_legend(figure: Figure, title: str = "", most: int = 6) -> None:
    """A legend below the figure with the roles of all its masks, `most` in a row."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        artists, names = axes.get_legend_handles_labels()
        handles |= zip(names, artists, strict=True)
    role_names = [role.name for role in Role if role.name in handles]
    figure.legend(
        [handles[name] for name in role_names],
        role_names,
        loc="outside lower center",
        ncols=min(len(role_names), most),
        frameon=False,
        title=title,
    )


def draw_mask(axes: Axes, layout: Layout, order: str) -> None:
    """The mask, with a strip along its sides that shows the roles of queries and keys."""
    tokens, count = tokens_in(order, layout), len(layout)
    roles, documents = layout.roles[tokens].astype(int), layout.documents[tokens]
    # Seen pairs take the colour of the key's role; 0 is unseen.
    image = np.where(layout.dense_mask(order), roles + 1, 0)
    axes.imshow(image, cmap=PALETTE, vmin=-0.5, vmax=len(Role) + 0.5, interpolation="nearest")
    if count <= 64:
        axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#DDDDDD", linewidth=0.4)
        axes.tick_params(which="minor", length=0)
    strip = PALETTE(roles[None] + 1)
    width = max(1.0, count / 40)
    axes.imshow(strip, extent=(-0.5, count - 0.5, -0.7, -0.7 - width), interpolation="nearest")
    axes.imshow(strip.transpose(1, 0, 2)[::-1], extent=(-0.7 - width, -0.7, -0.5, count - 0.5), interpolation="nearest")
    for edge in np.flatnonzero(np.diff(documents)) + 0.5:
        axes.axhline(edge, color="black", linewidth=0.8)
        axes.axvline(edge, color="black", linewidth=0.8)
    for role in Role:
        if (roles == role).any():
            # Only for a legend.
            axes.plot(
                [], [], color=ROLE_COLOURS[role], marker=MARKERS[role], label=role.name, linestyle="", markersize=8,
                markeredgecolor="black", markeredgewidth=0.5,
            )  # fmt: skip
    axes.set_xlim(-0.8 - width, count - 0.5)
    axes.set_ylim(count - 0.5, -0.8 - width)
    ticks = [tick for tick in MaxNLocator(6, integer=True).tick_values(0, count - 1) if 0 <= tick < count]
    axes.set(xticks=ticks, yticks=ticks, xlabel="key", ylabel="query")
    axes.spines[:].set_visible(False)


def draw_positions(axes: Axes, layout: Layout, order: str, *, size: float = 22) -> None:
    """The position IDs of the tokens in an order, a marker of `size` square points each."""
    tokens = tokens_in(order, layout)
    roles, positions = layout.roles[tokens], np.atleast_2d(layout.positions)[:, tokens]
    # Markers that would cover each other are smaller and without an edge.
    dense = len(layout) > 64
    for role in Role:
        columns = np.flatnonzero(roles == role)
        for ids in positions:
            axes.scatter(
                columns, ids[columns], s=size / 3 if dense else size, marker=MARKERS[role],
                facecolor=ROLE_COLOURS[role], edgecolor="none" if dense else "black", linewidth=0.4,
            )  # fmt: skip
    axes.set_xlim(-1, len(layout))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
