"""Pictures of the study `voco`: right answers by tokens and by steps, and where VoCo tokens look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    Args:
        lines: {kind: {method: {tokens: the seeds' shares}}}; points are means, bars go from lowest to highest.
        bounds: {kind: {title: share}}, thin horizontal lines.
        titles: of the methods.
    """
    figure = Picture(figsize=(3.2 * len(lines) + 2.0, 3.4), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(lines), squeeze=False, sharey=True)[0]
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
        axes.set(xlabel="tokens left of an image", ylim=(0, 105))
        axes.set_title(kind, loc="left", fontsize=10)
        tidy(axes)
    panels[0].set_ylabel("right answers (%)")
    if panels[-1].get_legend_handles_labels()[0]:
        legend_beside(panels[-1])
    return figure


def draw_curves(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[tuple[int, float]]]]], label: str, titles: Mapping[str, str]
) -> Figure:
    """Held-out figures by training steps, a panel a ratio and a line a method, with a band from lowest to highest.

    Args:
        curves: {panel: {method: its seeds' curves of (step, value)}}.
        label: of the vertical axis.
        titles: of the methods.
    """
    figure = Picture(figsize=(3.6 * len(curves) + 2.0, 3.4), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for axes, (panel, arms) in zip(panels, curves.items(), strict=True):
        for method, seeds in arms.items():
            draw_band(axes, seeds, label=titles[method], markersize=4, **STYLE[method])
        axes.set(xlabel="training step", ylim=(0, 105))
        axes.set_title(panel, loc="left", fontsize=10)
        tidy(axes)
    panels[0].set_ylabel(label)
    legend_beside(panels[-1])
    return figure


def draw_maps(maps: Mapping[str, NDArray[Any]], tokens: Sequence[int], picture: NDArray[Any], title: str) -> Figure:
    """Heat maps over an image, a row a name and a column a token; the image itself in front.

    Args:
        maps: float [tokens, side, side] by name; each map is scaled to its own largest weight, which stands above it.
        tokens: their numbers.
        picture: [height, width], drawn in grey.
        title: of all.
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
