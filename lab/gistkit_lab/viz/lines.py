"""Lines over seeds: their mean, and how far they reach; the studies' loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, OTHER_STYLES, Picture, tidy


def styles(shapes: Mapping[str, tuple[str, str, str]]) -> dict[str, dict[str, Any]]:
    """Keyword arguments of lines from colour, dashes and marker."""
    return {
        name: {"color": COLOURS[colour], "linestyle": dashes, "marker": marker}
        for name, (colour, dashes, marker) in shapes.items()
    }


LAYOUT_STYLE = styles(
    {"dpl": ("red", "--", "s"), "upl": ("sky", "-.", "^"), "epl": ("blue", "-", "o"), "cpl": ("green", ":", "D")}
)


def legend_beside(axes: Axes, *entries: Any) -> None:
    """A legend to the right of the axes. `entries`: handles and labels; without them, everything with a label."""
    axes.legend(*entries, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9)


def draw_band(axes: Axes, seeds: Sequence[Sequence[Any]], *, alpha: float = 0.2, **style: Any) -> Any:
    """The line of the mean of the seeds' curves, points of (x, y, ...), with a band from lowest to highest."""
    points = np.array([[point[:2] for point in curve] for curve in seeds], dtype=float)
    at, values = points[..., 0].mean(0), points[..., 1]
    (line,) = axes.plot(at, values.mean(0), **style)
    if len(seeds) > 1:
        axes.fill_between(at, values.min(0), values.max(0), color=style["color"], alpha=alpha, linewidth=0)
    return line


def draw_bars(axes: Axes, values: Mapping[Any, Sequence[float]], **style: Any) -> Any:
    """The line of the mean of {x: the seeds' values}, with bars from lowest to highest."""
    at = sorted(values)
    means = np.array([np.mean(values[x]) for x in at])
    reach = np.abs([[np.min(values[x]), np.max(values[x])] for x in at] - means[:, None]).T
    return axes.errorbar(at, means, reach, capsize=2, **style)


def draw_loss_curves(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float, float]]]],
    *,
    goal: float,
    legend: str = "position layout",
) -> Figure:
    """Held-out loss against training steps, a line a layout, with a band from lowest to highest over seeds.

    Args:
        curves: for each layout, or other setting, its seeds' curves of (step, loss in nats a token, accuracy).
        goal: loss at which a thin line is drawn.
        legend: title of the legend.
    """
    figure = Picture(figsize=(6.4, 4.0), layout="constrained", dpi=120)
    axes = figure.subplots()
    for index, (layout, seeds) in enumerate(curves.items()):
        style = LAYOUT_STYLE.get(layout, OTHER_STYLES[index % len(OTHER_STYLES)])
        name = layout.upper() if layout in LAYOUT_STYLE else layout
        draw_band(axes, seeds, label=name, markersize=4, markevery=2, **style)
    axes.axhline(goal, color="0.5", linewidth=0.8)
    axes.annotate(f"loss {goal:g}", (0, goal), xytext=(2, 3), textcoords="offset points", color="0.35", fontsize=8)
    axes.set(xlabel="training step", ylabel="held-out loss (nats a token)", ylim=(0, None))
    axes.set_title("Reconstructing a context from memory tokens", loc="left")
    axes.legend(frameon=False, title=legend)
    tidy(axes)
    return figure
