"""Pictures of position embeddings: how alike those of any two positions are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from gistkit.viz.style import COLOURS, Picture


def similarities(embeddings: ArrayLike, others: ArrayLike | None = None) -> NDArray[Any]:
    """Dot products e_p . e_p' of embeddings [P, D] with others [P', D] (their own by default): [P, P'].

    Each row is scaled from 0 to 1, because the row of a long embedding would dominate.
    """
    rows = np.asarray(embeddings, dtype=np.float64)
    products = rows @ (rows if others is None else np.asarray(others, dtype=np.float64)).T
    low, high = products.min(-1, keepdims=True), products.max(-1, keepdims=True)
    return (products - low) / np.maximum(high - low, np.finfo(np.float64).tiny)


def draw_similarity(embeddings: Mapping[str, ArrayLike], *, trained: int | None = None) -> Figure:
    """Heat maps of e_p . e_p' of positions 0, 1, ..., one for each encoder (SeqPE, Figure 2).

    Args:
        embeddings: [P, D] by title, such as "before training" and "after training".
        trained: number of positions in training; a dashed line marks it.
    """
    arrays = arrays_of(embeddings, "P, D")
    figure = Picture(figsize=(1.2 + 3.6 * len(arrays), 3.9), layout="constrained")
    grid = figure.subplots(1, len(arrays), squeeze=False)[0]
    for axes, (title, rows) in zip(grid, arrays.items(), strict=True):
        image = axes.imshow(similarities(rows), cmap="magma", interpolation="nearest")
        axes.set(title=title, xlabel="position p'")
        if trained is not None:
            for line in (axes.axvline, axes.axhline):
                line(trained - 0.5, color=COLOURS["sky"], linewidth=1.0, linestyle="--")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    figure.colorbar(image, ax=grid[-1], label="e_p . e_p', from 0 to 1 in each row")
    grid[0].set_ylabel("position p")
    return figure


def arrays_of(embeddings: Mapping[str, ArrayLike], shape: str) -> dict[str, NDArray[Any]]:
    """Embeddings by title as arrays of a shape such as "P, D"."""
    arrays = {title: np.asarray(rows) for title, rows in embeddings.items()}
    if not arrays:
        raise ValueError("embeddings: expected one array or more, by title, got none")
    for title, rows in arrays.items():
        if rows.ndim != shape.count(",") + 1 or 0 in rows.shape:
            raise ValueError(f"embeddings: expected [{shape}] for {title!r}, got shape {list(rows.shape)}")
    return arrays
