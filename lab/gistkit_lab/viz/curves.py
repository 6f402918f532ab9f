"""Training curves of runs, a panel a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gistkit.viz.style import OTHER_STYLES, Picture, tidy


def draw_training_curves(
    runs: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], *, goal: float | None = None
) -> Figure:
    """Training losses against steps, a panel a loss and a line a run (Position IDs Matter, Figures 4 and 5).

    Args:
        runs: {title: {loss: [(step, nats a token)]}}, as `training_curves` gives them; at most as many as styles.
        goal: loss at which the first panel has a thin line; None: none.

    Raises:
        ValueError: if there are no or too many runs, or none has a curve.
    """
    losses = list(dict.fromkeys(loss for curves in runs.values() for loss in curves))
    if not losses or len(runs) > len(OTHER_STYLES):
        raise ValueError(
            f"draw_training_curves: expected curves of 1 to {len(OTHER_STYLES)} runs, got {len(runs)} with "
            f"{len(losses)} losses"
        )
    figure = Picture(figsize=(5.2 * len(losses), 3.8), layout="constrained", dpi=120)
    grid: Any = figure.subplots(1, len(losses), squeeze=False)[0]
    for axes, loss in zip(grid, losses, strict=True):
        for style, (title, curves) in zip(OTHER_STYLES, runs.items(), strict=False):
            if curve := curves.get(loss):
                line = {name: style[name] for name in ("color", "linestyle")}
                axes.plot(*zip(*curve, strict=True), label=title, linewidth=1.2, **line)
        axes.set(xlabel="training step", ylabel="training loss (nats a token)", ylim=(0, None))
        axes.set_title(loss.upper() if len(loss) == 2 else loss, loc="left")
        tidy(axes)
    if goal is not None:
        grid[0].axhline(goal, color="0.5", linewidth=0.8)
    grid[0].legend(frameon=False)
    return figure
