"""Pictures of the study `in-place`: figures against the compression ratio, and training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, Picture, tidy

STYLE: dict[str, dict[str, Any]] = {
    "No context": {"color": COLOURS["grey"], "linestyle": ":", "marker": ""},
    "Full context": {"color": COLOURS["black"], "linestyle": ":", "marker": ""},
    "Gist": {"color": COLOURS["red"], "linestyle": "--", "marker": "s"},
    "OffsetGist": {"color": COLOURS["orange"], "linestyle": "--", "marker": "D"},
    "SepOffsetGist": {"color": COLOURS["purple"], "linestyle": "-.", "marker": "v"},
    "AvgPool": {"color": COLOURS["green"], "linestyle": "-", "marker": "^"},
    "GistPool": {"color": COLOURS["blue"], "linestyle": "-", "marker": "o"},
    "GistPool from means": {"color": COLOURS["sky"], "linestyle": "-", "marker": "P"},
    "SepGist": {"color": COLOURS["red"], "linestyle": "-.", "marker": "<"},
    "Gist with pool mask": {"color": COLOURS["red"], "linestyle": "-", "marker": "s"},
    "SepGist with pool mask": {"color": COLOURS["purple"], "linestyle": "-", "marker": "<"},
    "OffsetGist with pool mask": {"color": COLOURS["orange"], "linestyle": "-", "marker": "D"},
}
# Methods without a ratio are level lines.
LEVEL = ("No context", "Full context")


def draw_ratios(panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> Figure:
    """A panel a figure: its mean over seeds against the ratio, a line a method, with bars from lowest to highest.

    Args:
        panels: {name of the figure: {method: {ratio: the seeds' values}}}, methods as in `STYLE`.
    """
    figure = Picture(figsize=(1.4 + 3.3 * len(panels), 3.9), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, methods) in zip(grid, panels.items(), strict=True):
        ratios = sorted({ratio for method, values in methods.items() if method not in LEVEL for ratio in values} or {1})
        for method, values in methods.items():
            style = STYLE[method]
            if method in LEVEL:
                axes.axhline(float(np.mean(values[1])), label=method, **{**style, "linewidth": 1.2})
                continue
            at = sorted(values)
            means = np.array([np.mean(values[ratio]) for ratio in at])
            reach = np.abs([[np.min(values[ratio]), np.max(values[ratio])] for ratio in at] - means[:, None]).T
            axes.errorbar(at, means, reach, label=method, markersize=5, linewidth=1.4, capsize=2, **style)
        axes.set(xlabel="compression ratio", xscale="log", ylim=(0, None))
        axes.set_xticks(ratios, [f"{ratio}x" for ratio in ratios], minor=False)
        axes.minorticks_off()
        axes.set_title(name, loc="left", fontsize=10)
        tidy(axes)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle("Answering from a compressed context", x=0.01, ha="left")
    return figure


def draw_curves(curves: Mapping[tuple[str, int], Sequence[Sequence[tuple[int, float, float]]]]) -> Figure:
    """A panel a ratio: held-out loss against training steps, a line a method, with a band from lowest to highest.

    Args:
        curves: {(method, ratio): the seeds' curves of (step, loss in nats a token, exact)}; methods without a ratio
            stand in every panel.
    """
    ratios = sorted({ratio for method, ratio in curves if method not in LEVEL} or {1})
    figure = Picture(figsize=(1.6 + 2.7 * len(ratios), 3.7), layout="constrained")
    grid = figure.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    # Before the first step losses may be so large that the others could not be told apart.
    later = [loss for seeds in curves.values() for curve in seeds for _, loss, _ in curve[1:] or curve]
    for axes, ratio in zip(grid, ratios, strict=True):
        for (method, arm_ratio), seeds in curves.items():
            if method in LEVEL or arm_ratio == ratio:
                lines[method] = _line(axes, method, seeds)
        axes.set(xlabel="training step", ylim=(0, 1.1 * max(later, default=1.0)))
        axes.set_title(f"{ratio}x", loc="left")
        tidy(axes)
    grid[0].set_ylabel("held-out loss (nats a token)")
    methods = [method for method in STYLE if method in lines]
    figure.legend([lines[method] for method in methods], methods, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle("Learning to answer from a compressed context", x=0.01, ha="left")
    return figure


def _line(axes: Axes, method: str, seeds: Sequence[Sequence[tuple[int, float, float]]]) -> Any:
    steps = [step for step, *_ in seeds[0]]
    losses = np.array([[loss for _, loss, _ in curve] for curve in seeds])
    style = STYLE[method]
    (line,) = axes.plot(steps, losses.mean(0), markersize=4, linewidth=1.4, **style)
    if len(seeds) > 1:
        axes.fill_between(steps, losses.min(0), losses.max(0), color=style["color"], alpha=0.15, linewidth=0)
    return line
