"""What learned position encodings prefer: BERT's position embeddings, and T5's biases (Position IDs Matter, 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor, nn

from gistkit.viz.style import OTHER_STYLES, FigureOrAxes, axes_of, tidy

# How the tables of transformers' models are called: BERT's and its kin's, GPT-2's, OPT's.
_TABLES = ("position_embeddings", "wpe", "embed_positions")


@torch.no_grad()
def position_similarity(model: nn.Module) -> Tensor:
    """Cosine similarity of the learned embeddings of any two positions of a model, such as a BERT or a GPT-2.

    Args:
        model: of transformers, with one table of position embeddings, or several of a model in parts, the first of
            which counts.

    Returns:
        float32 [P, P]; row p has the similarities of position p to all positions.

    Raises:
        TypeError: if it has none.

    Paper: Position IDs Matter, Figures 9 and 10.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES:
            rows = torch.nn.functional.normalize(module.weight.float(), dim=-1)
            return rows @ rows.T
    raise TypeError(
        f"model: expected one with learned position embeddings, such as a BERT, got {type(model).__name__} without a "
        f"module named {', '.join(_TABLES)}"
    )


@torch.no_grad()
def relative_bias(model: nn.Module, distances: int = 128) -> Tensor:
    """T5's bias on attention logits, by the distance of a key before the query.

    Args:
        model: a T5 of transformers, whose encoder's biases are taken, or those of a part of it.
        distances: number of distances, from 0 (the query's own position); at least 1.

    Returns:
        float32 [heads, distances].

    Raises:
        ValueError: if `distances` is out of range.
        TypeError: if the model has no such biases.

    Paper: Position IDs Matter, Figure 2.
    """
    if distances < 1:
        raise ValueError(f"distances: expected at least 1, got {distances}")
    for module in model.modules():
        if isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding):
            attention: Any = module
            # The last query's: of keys before it, the nearest last.
            bias: Tensor = attention.compute_bias(distances, distances)[0, :, -1].flip(-1).float()
            return bias
    raise TypeError(f"model: expected one with relative attention biases, such as a T5, got {type(model).__name__}")


def draw_position_similarity(
    similarity: ArrayLike, positions: Sequence[int] = (0, 100, 200, 300), *, ax: Axes | None = None
) -> FigureOrAxes:
    """Similarity of some positions to all others, a line each (Position IDs Matter, Figure 10).

    The first position is that of BERT's [CLS] token; the map of all pairs (Figure 9) is that of any square picture.

    Args:
        similarity: [P, P], as `position_similarity` gives it.
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
        bias: [heads, distances], as `relative_bias` gives it.
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
