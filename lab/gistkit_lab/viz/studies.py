"""Loss curves of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from gistkit.viz.style import OTHER_STYLES, Picture, tidy
from gistkit_lab.viz.lines import LAYOUT_STYLE, draw_band


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
