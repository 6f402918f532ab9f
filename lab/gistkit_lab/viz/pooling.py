"""Where gists look in the study `pooling`: the pool mask beside the standard one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gistkit.viz.style import COLOURS, Picture

NAMES = {"fixed": "fixed length", "variable": "variable length", "at-zero": "variable length,\ngists at position 0"}
Weights = Sequence[Sequence[float]]


def draw_gist_attention(cells: Mapping[tuple[str, str], tuple[Weights, float]], ratio: int, *, title: str) -> Figure:
    """Attention weights of gists over the context: a row a kind of context, a column a mask.

    A dashed line marks the middle of each gist's own window. The palest colour is no attention, the darkest an even
    share of the own window or more.

    Args:
        cells: (context, mask): weights [m, n] and the share of right vectors, 0 to 1.
        ratio: context embeddings a window.
        title: part of the heading.

    Paper: GistPool, Figure 4.
    """
    rows, columns = list(dict.fromkeys(row for row, _ in cells)), list(dict.fromkeys(column for _, column in cells))
    figure = Picture(figsize=(1.4 + 4.2 * len(columns), 1.0 + 1.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    image = None
    for row, context in enumerate(rows):
        for column, mask in enumerate(columns):
            axes = grid[row][column]
            if (context, mask) not in cells:
                axes.set_axis_off()
                continue
            weights, share = cells[context, mask]
            image = axes.imshow(
                np.asarray(weights), aspect="auto", cmap="magma_r", vmin=0, vmax=1 / ratio, interpolation="nearest"
            )
            gists = np.arange(len(weights))
            axes.plot((gists + 0.5) * ratio - 0.5, gists, color=COLOURS["sky"], linewidth=1.2, linestyle="--")
            axes.set(xlim=(-0.5, len(weights[0]) - 0.5), ylim=(len(weights) - 0.5, -0.5))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_title(f"{mask} mask: {share:.0%} right", fontsize=10)
            if row == len(rows) - 1:
                axes.set_xlabel("context embedding")
            if column == 0:
                axes.set_ylabel(f"{NAMES.get(context, context)}\n\ngist")
    if image is not None:
        figure.colorbar(image, ax=grid, label="attention weight", extend="max", shrink=0.8)
    figure.suptitle(f"Where gists look ({title})", x=0.01, ha="left")
    return figure
