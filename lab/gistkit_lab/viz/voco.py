"""Pictures of the study `voco`: right answers by tokens and by steps, and where VoCo tokens look."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from gistkit.viz.style import Picture, tidy
from gistkit_lab.viz.lines import LAYOUT_STYLE, draw_band, draw_bars, legend_beside, styles

STYLE = LAYOUT_STYLE | styles(
    {"avgpool": ("orange", "-", "P"), "full": ("black", "-", "v"), "none": ("grey", ":", "x")}
)


def draw_accuracy(
    lines: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    bounds: Mapping[str, Mapping[str, float]],
    titles: Mapping[str, str],
) -> Figure:
    """Right answers in percent by the tokens that are left of an image, a panel a kind of question.

    `lines` are {kind: {method: {tokens: the seeds' shares}}}, `bounds` {kind: {title: share}}, thin horizontal lines.
    """
    figure, panels = _panels(lines, 3.2, "right answers (%)")
    for axes, (kind, methods) in zip(panels, lines.items(), strict=True):
        for method, values in methods.items():
            draw_bars(axes, values, label=titles[method], markersize=5, **STYLE[method])
        for name, share in bounds[kind].items():
            axes.axhline(share, color="0.5", linewidth=0.8)
            axes.annotate(name, (1, share), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
        counts = sorted({count for values in methods.values() for count in values})
        axes.set_xscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="tokens left of an image")
    if panels[-1].get_legend_handles_labels()[0]:
        legend_beside(panels[-1])
    return figure


def draw_curves(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[tuple[int, float]]]]], label: str, titles: Mapping[str, str]
) -> Figure:
    """Held-out figures by training steps, {panel: {method: the seeds' curves of (step, value)}}, a panel a ratio."""
    figure, panels = _panels(curves, 3.6, label)
    for axes, arms in zip(panels, curves.values(), strict=True):
        for method, seeds in arms.items():
            draw_band(axes, seeds, label=titles[method], markersize=4, **STYLE[method])
        axes.set(xlabel="training step")
    legend_beside(panels[-1])
    return figure


def _panels(titles: Collection[str], width: float, label: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure of percentages with a panel a title, each so many inches wide, and the panels."""
    figure = Picture(figsize=(width * len(titles) + 2.0, 3.4), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    for axes, title in zip(panels, titles, strict=True):
        axes.set(ylim=(0, 105))
        axes.set_title(title, loc="left", fontsize=10)
        tidy(axes)
    panels[0].set_ylabel(label)
    return figure, panels


def draw_maps(maps: Mapping[str, NDArray[Any]], tokens: Sequence[int], picture: NDArray[Any], title: str) -> Figure:
    """Heat maps over an image [height, width], a row a name and a column a token; the image itself in front.

    Maps are [tokens, side, side] by name, each scaled to its own largest weight, which stands above it.
    """
    figure = Picture(figsize=(1.5 * (len(tokens) + 1), 1.75 * len(maps) + 0.4), layout="constrained", dpi=120)
    grid: NDArray[Any] = figure.subplots(len(maps), len(tokens) + 1, squeeze=False)
    height, width = picture.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    for row, (name, arrays) in zip(grid, maps.items(), strict=True):
        _plain(row[0], picture)
        row[0].set_ylabel(name)
        for axes, token, weights in zip(row[1:], tokens, arrays, strict=True):
            _plain(axes, picture)
            largest = max(float(weights.max()), np.finfo(np.float64).tiny)
            axes.imshow(weights, cmap="magma", alpha=0.75, extent=extent, vmin=0, vmax=largest, interpolation="nearest")
            axes.set_title(f"token {token}, {largest:.2g}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _plain(axes: Axes, picture: NDArray[Any]) -> None:
    axes.imshow(picture, cmap="gray", interpolation="nearest")
    axes.set(xticks=(), yticks=())
