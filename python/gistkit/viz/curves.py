"""Training curves of runs, a panel a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gistkit.train.metrics import Record, running_mean
from gistkit.viz.studies import OTHER_STYLES
from gistkit.viz.style import Picture, tidy


def draw_training_curves(
    runs: Mapping[str, Sequence[Record]],
    losses: Sequence[str] = ("ae", "lm"),
    *,
    over: int = 10,
    goal: float | None = None,
) -> Figure:
    """Training losses against steps, a line a run (Position IDs Matter, Figures 4 and 5; ICAE with and without PI).

    Args:
        runs: by title the records of `read_metrics`; at most as many as styles. What a run does not have is not drawn.
        losses: names, a panel each; nats a token.
        over: each point is the mean over so many records.
        goal: loss at which the first panel has a thin line; None: none.

    Raises:
        ValueError: if there are no losses, no runs or too many, or none has a loss so often.
    """
    if not losses or not 1 <= len(runs) <= len(OTHER_STYLES):
        raise ValueError(
            f"draw_training_curves: expected losses of 1 to {len(OTHER_STYLES)} runs, got {len(losses)} of {len(runs)}"
        )
    figure = Picture(figsize=(5.2 * len(losses), 3.8), layout="constrained", dpi=120)
    grid: Any = figure.subplots(1, len(losses), squeeze=False)[0]
    for axes, loss in zip(grid, losses, strict=True):
        curves = {title: running_mean(records, loss, over) for title, records in runs.items()}
        if not any(curves.values()):
            raise ValueError(f"draw_training_curves: expected a run with {over} records of the loss {loss}, got none")
        for style, (title, curve) in zip(OTHER_STYLES, curves.items(), strict=False):
            line = {name: style[name] for name in ("color", "linestyle")}
            if curve:
                axes.plot(*zip(*curve, strict=True), label=title, linewidth=1.2, **line)
        axes.set(xlabel="training step", ylabel="training loss (nats a token)", ylim=(0, None))
        axes.set_title(loss.upper() if len(loss) == 2 else loss, loc="left")
        tidy(axes)
    if goal is not None:
        grid[0].axhline(goal, color="0.5", linewidth=0.8)
    grid[0].legend(frameon=False)
    return figure
