"""Loss curves and attention maps of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, LAYOUT_STYLE, Drawn, Picture, axes_of, tidy


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


def draw_memory_attention(
    maps: Mapping[str, Sequence[Sequence[Sequence[float]]]], ratio: float, first_layer: int = 0
) -> Figure:
    """Attention of memory tokens over the context: a row a layer, a column a layout, and the line of even coverage.

    Args:
        maps: for each layout its layers' weights [M, L].
        ratio: context tokens a memory token stands for; the line's slope.
        first_layer: number of the first layer given.
    """
    layers = max(len(one) for one in maps.values())
    figure = Picture(figsize=(max(5.6, 1.2 + 3.2 * len(maps)), 0.9 + 1.6 * layers), layout="constrained")
    grid = figure.subplots(layers, len(maps), squeeze=False, sharex=True, sharey=True)
    image = None
    for column, (layout, one) in enumerate(maps.items()):
        for row, weights in enumerate(one):
            share = np.asarray(weights)
            share = share / share.sum(-1, keepdims=True)
            memory, context = share.shape
            axes = grid[row][column]
            image = axes.imshow(share, aspect="auto", cmap="magma_r", vmin=0, vmax=1 / ratio, interpolation="nearest")
            slots = np.arange(memory)
            axes.plot((slots + 0.5) * ratio - 0.5, slots, color=COLOURS["sky"], linewidth=1.2, linestyle="--")
            axes.set(xlim=(-0.5, context - 0.5), ylim=(memory - 0.5, -0.5))
            if row == 0:
                axes.set_title(layout.upper())
            if row == layers - 1:
                axes.set_xlabel("context token")
            if column == 0:
                axes.set_ylabel(f"layer {first_layer + row}\nmemory token")
    if image is not None:
        figure.colorbar(image, ax=grid, label="share of attention", extend="max", shrink=0.8)
    figure.suptitle(f"Where memory tokens look (dashed: one step of {ratio:g} tokens a slot)", x=0.01, ha="left")
    return figure
