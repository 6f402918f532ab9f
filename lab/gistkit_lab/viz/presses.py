"""Quality against what is kept: a line a kind of memory, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, Picture, tidy
from gistkit_lab.viz.lines import legend_beside

# In the order of first use; then with other markers.
_STYLES: tuple[tuple[str, str, str], ...] = (
    ("blue", "-", "o"), ("orange", "-", "D"), ("green", "-", "s"), ("purple", "-", "^"), ("sky", "-", "v"),
    ("grey", "--", "P"), ("yellow", "--", "X"), ("black", ":", "h"), ("blue", ":", "*"), ("orange", ":", "p"),
    ("green", ":", "d"), ("purple", ":", "<"), ("sky", ":", ">"),
)  # fmt: skip
_FILLS = ("full", "none", "left", "right", "bottom", "top")
# Memories that are drawn as lines across, with a band from low to high.
_LEVELS = ("full context", "no context")


def draw_presses(
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], *, marked: Sequence[str] = ()
) -> Figure:
    """A panel a reader of several memories: quality of each against the share of tokens that it keeps.

    Args:
        curves: {panel: {memory: [(share kept, mean, low, high)]}}; means are exact answers in percent.
        marked: memories that are drawn in red.

    Raises:
        ValueError: if there is no panel.
    """
    curves = {title: lines for title, lines in curves.items() if lines.keys() - {*_LEVELS}} or curves
    if not curves:
        raise ValueError("curves: expected at least one panel, got none")
    names = list(dict.fromkeys(name for lines in curves.values() for name in lines))
    lines_of = [name for name in names if name not in (*_LEVELS, *marked)]
    looks = cycle((*style, fill) for fill in _FILLS for style in _STYLES)
    styles = dict(zip(lines_of, looks, strict=False)) | dict.fromkeys(marked, ("red", "-", "o", "full"))
    figure = Picture(figsize=(4.4 * len(curves) + 2.4, 4.4), layout="constrained", dpi=120)
    panels: Any = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    shares = sorted({point[0] for lines in curves.values() for name in lines_of for point in lines.get(name, ())})
    for axes, (title, lines) in zip(panels, curves.items(), strict=True):
        for name in [name for name in names if name in lines]:
            if name in _LEVELS:
                _, level, lowest, highest = lines[name][-1]
                dashes = "-" if name == _LEVELS[0] else ":"
                axes.axhline(level, color="0.35", linewidth=1, linestyle=dashes, label=name)
                axes.axhspan(lowest, highest, color="0.5", alpha=0.12, linewidth=0)
                continue
            share, mean, low, high = zip(*lines[name], strict=True)
            colour, dashes, marker, fill = styles[name]
            # A little apart, so that intervals can be told apart.
            apart = 1.0 + 0.015 * (names.index(name) - len(names) / 2)
            ends = [[m - a for m, a in zip(mean, low, strict=True)], [b - m for m, b in zip(mean, high, strict=True)]]
            axes.errorbar(
                [place * apart for place in share], mean, yerr=ends, color=COLOURS[colour], linestyle=dashes,
                marker=marker, fillstyle=fill, markersize=9 if name in marked else 5, linewidth=1.4, elinewidth=0.7,
                capsize=2, label=name,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        ticks = [1 / 16, 1 / 8, 1 / 4, 1 / 2]
        if shares and shares[0] < 1 / 24:
            ticks.insert(0, 1 / 32)
        axes.set_xticks(ticks, [f"1/{1 / tick:.0f}" for tick in ticks])
        if shares:
            axes.set_xlim(min(shares[0], ticks[0]) * 0.85, max(shares[-1], ticks[-1]) * 1.2)
        axes.set(xlabel="share of the tokens kept")
        axes.set_title(title, loc="left", fontsize=10)
        tidy(axes)
    # Of all panels, after the last of them has its points.
    panels[0].set(ylabel="exact answers, %", ylim=(0, None))
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend_beside(panels[-1], list(handles.values()), list(handles))
    return figure
