"""Dodo's figures beside others: reconstruction by length, and perplexity at equal memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gistkit.viz.style import Picture, tidy
from gistkit_lab.viz.lines import draw_bars, legend_beside, styles

STYLE = styles(
    {
        "Full (sliding)": ("black", "-", "P"),
        "Full (truncated)": ("black", ":", "p"),
        "No nuggets": ("grey", ":", "s"),
        "Compressive": ("orange", "--", "D"),
        "Dodo learned": ("blue", "-", "o"),
        "Dodo strided": ("sky", "-.", "^"),
        "Dodo random": ("red", "-.", "v"),
        "Dodo delimiters": ("green", "-.", "<"),
        "Dodo frozen scorer": ("purple", "--", ">"),
    }
)
STYLE["Full (truncated)"]["markerfacecolor"] = "white"


def draw_bleu_by_length(series: Mapping[str, Mapping[int, Sequence[float]]]) -> Figure:
    """BLEU of reconstructed texts against their length, a line a method, bars from lowest to highest over seeds.

    Args:
        series: {method: {tokens of the text: BLEU of each seed, 0 to 100}}. A method whose name is not in `STYLE` gets
            an unused style; at most as many methods as styles.

    Paper: Dodo, Figure 4.
    """
    style = _styles("draw_bleu_by_length", series)
    figure = Picture(figsize=(6.8, 4.0), layout="constrained", dpi=120)
    axes, lowest = figure.subplots(), 100.0
    for method, lengths in series.items():
        _check("draw_bleu_by_length", method, list(lengths.values()))
        draw_bars(axes, lengths, label=method, markersize=5, linewidth=1.4, **style[method])
        lowest = min(lowest, *map(min, lengths.values()))
    floor = max(0.0, (lowest - 1) // 10 * 10)
    axes.set(xlabel="text length (tokens)", ylabel="BLEU")
    # Markers at either end stay whole.
    axes.set_ylim(floor - 0.02 * (100 - floor), 100 + 0.02 * (100 - floor))
    axes.set_title("Reconstructing a text from its compressed form", loc="left")
    legend_beside(axes)
    tidy(axes)
    return figure


def draw_perplexity(series: Mapping[str, Sequence[tuple[float, Sequence[float]]]], *, title: str = "") -> Figure:
    """Perplexity against the states a prediction attends to, a line an arm, bars from lowest to highest over seeds.

    Args:
        series: {arm: [(measured states, above 0; perplexity of each seed)]}, arms as in `STYLE`; others get an unused
            style; at most as many arms as styles.
        title: a heading.

    Paper: Dodo, Table 1.
    """
    style = _styles("draw_perplexity", series)
    figure = Picture(figsize=(7.4, 4.4), layout="constrained", dpi=120)
    axes, measured = figure.subplots(), list[float]()
    for arm, points in series.items():
        points = sorted(points, key=lambda point: point[0])
        states = [states for states, _ in points]
        _check("draw_perplexity", arm, [values for _, values in points])
        if states[0] <= 0:
            raise ValueError(f"draw_perplexity: expected states above 0, got {states[0]:g} of {arm!r}")
        draw_bars(axes, dict(points), label=arm, markersize=6, linewidth=1.4, **style[arm])
        measured += states
    axes.set_xscale("log", base=2)
    ticks = 2.0 ** np.unique(np.round(np.log2(measured)))
    ticks = ticks if len(ticks) > 1 else np.unique([min(measured), max(measured)])
    axes.set_xlim(min(*measured, ticks[0]) / 1.15, max(*measured, ticks[-1]) * 1.15)
    axes.set_xticks(ticks, [f"{round(tick, 1):g}" for tick in ticks])
    axes.set(xlabel="states that a prediction attends to (measured)", ylabel="perplexity")
    axes.set_title(title or "Perplexity at equal memory", loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [arm for arm in STYLE if arm in series] + [arm for arm in series if arm not in STYLE]
    legend_beside(axes, [handles[arm] for arm in order], order)
    tidy(axes)
    return figure


def _styles(function: str, series: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The style of each name: its own, or an unused one."""
    if not 1 <= len(series) <= len(STYLE):
        raise ValueError(f"{function}: expected 1 to {len(STYLE)} series, got {len(series)}")
    spare = (style for name, style in reversed(STYLE.items()) if name not in series)
    return {name: STYLE[name] if name in STYLE else next(spare) for name in series}


def _check(function: str, name: str, points: Sequence[Sequence[float]]) -> None:
    """Refuses points without values, or with others than numbers."""
    if not points or not all(len(seeds) and np.isfinite(seeds).all() for seeds in points):
        raise ValueError(f"{function}: expected points of finite values, at least one each, of {name!r}")
