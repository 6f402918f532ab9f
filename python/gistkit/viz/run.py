"""One training run: its losses, learning rate, gradients and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, OTHER_STYLES, Picture, tidy

PANELS = {"lr": "learning rate", "grad_norm": "gradient norm, before clipping", "tokens_per_second": "tokens a second"}
NOT_LOSSES = {"step", "loss", "seconds", "held_out", *PANELS}


def draw_training_run(records: Sequence[Mapping[str, Any]], *, over: int | None = None, title: str = "") -> Figure:
    """The records of a run: each loss with its held-out values, and beside it what else was measured.

    Args:
        records: as `gistkit.train.read_metrics` gives them.
        over: steps that the strong lines are means of; None: a 50th of the run's.
        title: of the picture.

    Raises:
        ValueError: if there is no record of a step.
    """
    steps = [record for record in records if "held_out" not in record]
    if not steps:
        raise ValueError("draw_training_run: expected records of at least 1 step, got none")
    over = max(len(steps) // 50, 1) if over is None else over
    names = sorted({name for record in steps for name in record.keys() - NOT_LOSSES}) or ["loss"]
    panels = {name: label for name, label in PANELS.items() if any(name in record for record in steps)}
    figure = Picture(figsize=(6.4 + 3.2 * bool(panels), 4.4), layout="constrained", dpi=120)
    grid = figure.add_gridspec(max(len(panels), 1), 2 if panels else 1, width_ratios=[2, 1] if panels else None)
    axes = figure.add_subplot(grid[:, 0])
    for style, name in zip(OTHER_STYLES, names, strict=False):
        line = {key: style[key] for key in ("color", "linestyle")}
        x, y = _series(steps, name)
        axes.plot(x, y, color=style["color"], alpha=0.25, linewidth=0.7)
        # Of fewer values than that, all.
        own = max(min(over, len(y)), 1)
        axes.plot(x[own - 1 :], _means(y, own), label=name, linewidth=1.6, **line)
        held = [(record["step"], record["held_out"][name]) for record in records if name in record.get("held_out", {})]
        if held:
            axes.plot(
                *zip(*held, strict=True), linestyle="", marker=style["marker"], color=style["color"],
                label=f"{name}, held out",
            )  # fmt: skip
    axes.set(xlabel="training step", ylabel="loss (nats a token)", ylim=(0, None))
    axes.set_title(title, loc="left", parse_math=False)
    axes.legend(frameon=False)
    tidy(axes)
    for row, (name, label) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[row, 1])
        axes.plot(*_series(steps, name), color=COLOURS["blue"], linewidth=1)
        axes.set_title(label, loc="left", fontsize=9)
        axes.set_ylim(0, None)
        if row == len(panels) - 1:
            axes.set_xlabel("training step")
        tidy(axes)
    return figure


def _series(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[name]) for record in steps if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _means(values: Sequence[float], over: int) -> list[float]:
    return [fmean(values[end - over : end]) for end in range(over, len(values) + 1)]
