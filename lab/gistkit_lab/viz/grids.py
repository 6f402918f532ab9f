"""Similarities of position embeddings over a grid, as of image patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from gistkit.viz.style import COLOURS, Picture
from gistkit_lab.viz.similarity import arrays_of, similarities


def draw_grid_similarity(
    embeddings: Mapping[str, ArrayLike], points: Sequence[tuple[int, int]] | None = None
) -> Figure:
    """Maps of e_p . e_p' over a grid of positions p', a column for each position p and a row for each encoder (SeqPE,
    Figure 3).

    Args:
        embeddings: [height, width, D] by title.
        points: the positions p, (row, column); by default the middle and the four corners' neighbourhoods.
    """
    arrays = arrays_of(embeddings, "height, width, D")
    height, width = next(iter(arrays.values())).shape[:2]
    if points is None:
        far = (height - 1 - height // 5, width - 1 - width // 5)
        points = [(i, j) for i in (height // 5, far[0]) for j in (width // 5, far[1])]
        points.insert(2, (height // 2, width // 2))
    for i, j in points:
        if not (0 <= i < height and 0 <= j < width):
            raise ValueError(f"points: expected positions within {height} x {width}, got {(i, j)}")
    figure = Picture(figsize=(0.5 + 1.9 * len(points), 0.3 + 2.1 * len(arrays)), layout="constrained")
    grid = figure.subplots(len(arrays), len(points), squeeze=False)
    for row, (title, maps) in zip(grid, arrays.items(), strict=True):
        flat = maps.reshape(-1, maps.shape[-1])
        for axes, (i, j) in zip(row, points, strict=True):
            image = similarities(maps[i, j][None], flat).reshape(height, width)
            axes.imshow(image, cmap="magma", interpolation="nearest")
            axes.plot(j, i, marker="s", markersize=7, markerfacecolor="none", markeredgecolor=COLOURS["sky"])
            axes.set(title=f"({i}, {j})", xticks=[], yticks=[])
        row[0].set_ylabel(title)
    return figure
