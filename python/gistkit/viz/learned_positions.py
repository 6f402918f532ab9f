"""Pictures of what learned position encodings prefer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from gistkit.viz.style import OTHER_STYLES, FigureOrAxes, axes_of, tidy


def draw_position_similarity(
    similarity: ArrayLike, positions: Sequence[int] = (0, 100, 200, 300), *, ax: Axes | None = None
) -> FigureOrAxes:
    """Similarity of some positions to all others, a line each (Position IDs Matter, Figure 10).

    The first position is that of BERT's [CLS] token; the map of all pairs (Figure 9) is that of any square picture.

    Args:
        similarity: [P, P], as `gistkit.inspect.position_similarity` gives it.
        positions: rows to draw, those below P; at most as many as styles.
        ax: axes to draw into.

    Raises:
        ValueError: if the matrix is not square, or no position is in it.
    """
    values = np.asarray(similarity, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"similarity: expected a square matrix, got shape {values.shape}")
    rows = [position for position in positions if 0 <= position < len(values)]
    if not 1 <= len(rows) <= len(OTHER_STYLES):
        raise ValueError(f"positions: expected 1 to {len(OTHER_STYLES)} below {len(values)}, got {list(positions)}")
    return _lines({f"position {row}": values[row] for row in rows}, "position", "cosine similarity", ax)


def draw_relative_bias(bias: ArrayLike, *, ax: Axes | None = None) -> FigureOrAxes:
    """What a T5 adds to attention logits by the distance of a key, mean and range of its heads (Figure 2 there).

    Args:
        bias: [heads, distances], as `gistkit.inspect.relative_bias` gives it.
        ax: axes to draw into.

    Raises:
        ValueError: if it has another number of dimensions.
    """
    values = np.asarray(bias, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"bias: expected [heads, distances], got shape {values.shape}")
    lines = {"mean of heads": values.mean(0), "largest": values.max(0), "least": values.min(0)}
    return _lines(lines, "distance of the key before the query", "bias of the logit", ax)


def _lines(lines: dict[str, np.ndarray], across: str, up: str, ax: Axes | None) -> FigureOrAxes:
    result, axes = axes_of(ax, (6.4, 3.8))
    for style, (label, values) in zip(OTHER_STYLES, lines.items(), strict=False):
        axes.plot(values, label=label, linewidth=1.2, color=style["color"], linestyle=style["linestyle"])
    axes.set(xlabel=across, ylabel=up)
    axes.legend(frameon=False)
    tidy(axes)
    return result
