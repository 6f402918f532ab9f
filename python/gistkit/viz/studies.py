"""Loss curves of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from gistkit.viz.style import COLOURS, LAYOUT_STYLE, Drawn, axes_of, tidy


def draw_loss_curves(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float, float]]]], *, goal: float, ax: Axes | None = None
) -> Drawn:
    """Held-out loss against training steps, a line a layout, with a band from lowest to highest over seeds.

    Args:
        curves: for each layout its seeds' curves of (step, loss in nats a token, accuracy).
        goal: loss at which a thin line is drawn.
        ax: axes to draw into.
    """
    drawn, axes = axes_of(ax, (6.4, 4.0))
    for layout, seeds in curves.items():
        steps = [step for step, *_ in seeds[0]]
        losses = np.array([[loss for _, loss, _ in curve] for curve in seeds])
        style = LAYOUT_STYLE.get(layout, {"color": COLOURS["purple"]})
        axes.plot(steps, losses.mean(0), label=layout.upper(), markersize=4, markevery=2, **style)
        if len(seeds) > 1:
            axes.fill_between(steps, losses.min(0), losses.max(0), color=style["color"], alpha=0.2, linewidth=0)
    axes.axhline(goal, color="0.5", linewidth=0.8)
    axes.annotate(f"loss {goal:g}", (0, goal), xytext=(2, 3), textcoords="offset points", color="0.35", fontsize=8)
    axes.set(xlabel="training step", ylabel="held-out loss (nats a token)", ylim=(0, None))
    axes.set_title("Reconstructing a context from memory tokens", loc="left")
    axes.legend(frameon=False, title="position layout")
    tidy(axes)
    return drawn
