"""Pictures of the studies `length`, `retrieval` and `resolution`: figures against what is tested beyond training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, Picture, tidy

STYLE: dict[str, dict[str, Any]] = {
    "NoPE": {"color": COLOURS["grey"], "linestyle": ":", "marker": "x"},
    "Sinusoidal": {"color": COLOURS["yellow"], "linestyle": "--", "marker": "s"},
    "Learned": {"color": COLOURS["orange"], "linestyle": "--", "marker": "D"},
    "RoPE2D": {"color": COLOURS["red"], "linestyle": "-.", "marker": "^"},
    "RoPE2D-Mix": {"color": COLOURS["green"], "linestyle": "-", "marker": "v"},
    "RoPE 1e4": {"color": COLOURS["red"], "linestyle": "-.", "marker": "^"},
    "RoPE 1e6": {"color": COLOURS["red"], "linestyle": "--", "marker": "v"},
    "RoPE 1e8": {"color": COLOURS["red"], "linestyle": ":", "marker": "<"},
    "ALiBi": {"color": COLOURS["green"], "linestyle": "-", "marker": "P"},
    "SeqPE AttnSum": {"color": COLOURS["sky"], "linestyle": "--", "marker": "p"},
    "SeqPE AttnMul": {"color": COLOURS["purple"], "linestyle": "--", "marker": "h"},
    "SeqPE AttnBias": {"color": COLOURS["blue"], "linestyle": "-", "marker": "o"},
    "SeqPE AttnBias without L_delta": {"color": COLOURS["black"], "linestyle": ":", "marker": "o"},
    "SeqPE AttnBias without both losses": {"color": COLOURS["black"], "linestyle": "-.", "marker": "o"},
    "SeqPE AttnMul without both losses": {"color": COLOURS["black"], "linestyle": "-.", "marker": "h"},
    "SeqPE AttnMul without L_delta": {"color": COLOURS["black"], "linestyle": ":", "marker": "h"},
    "SeqPE AttnMul without L_OOD": {"color": COLOURS["black"], "linestyle": "--", "marker": "h"},
    "SeqPE AttnBias without L_OOD": {"color": COLOURS["black"], "linestyle": "--", "marker": "o"},
}


@dataclass(frozen=True)
class Panel:
    """One figure of several encodings.

    Args:
        title: what is shown, and where.
        lines: {encoding, as in `STYLE`: {length or size: the seeds' values}}.
        logarithmic: the vertical axis.
    """

    title: str
    lines: Mapping[str, Mapping[float, Sequence[float]]]
    logarithmic: bool = True


def draw_lengths(panels: Sequence[Panel], title: str) -> Figure:
    """A panel a figure: its mean over seeds against the length, a line an encoding, with bars from lowest to highest.

    The shortest length of a panel is that of training, and has a thin vertical line.
    """
    figure, grid = _lines(panels, title)
    for axes, panel in zip(grid, panels, strict=True):
        lengths = _sizes(panel)
        axes.set_xticks(lengths, [_short(int(length)) for length in lengths])
        if panel.logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.02)
        axes.set_xlabel("tokens in a chunk (dotted: in training)")
    return figure


def draw_sizes(panels: Sequence[Panel], title: str) -> Figure:
    """The same against the size of images, as a multiple of training's."""
    figure, grid = _lines(panels, title)
    for axes, panel in zip(grid, panels, strict=True):
        sizes = _sizes(panel)
        # Labels that would touch are left out.
        ticks = [
            size for size, next_size in zip(sizes, [*sizes[1:], float("inf")], strict=True) if next_size / size > 1.06
        ]
        axes.set_xticks(ticks, [f"{size:.3g}x" for size in ticks])
        axes.set_xlabel("side of the images (dotted: in training)")
    return figure


def _lines(panels: Sequence[Panel], title: str) -> tuple[Figure, Sequence[Axes]]:
    figure = Picture(figsize=(2.4 + 3.5 * len(panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        for name, line in panel.lines.items():
            at = sorted(line)
            means = np.array([np.mean(line[size]) for size in at])
            reach = np.abs([[np.min(line[size]), np.max(line[size])] for size in at] - means[:, None]).T
            bars = axes.errorbar(at, means, reach, markersize=4.5, linewidth=1.3, capsize=2, **STYLE[name])
            handles.setdefault(name, bars)
        axes.axvline(_sizes(panel)[0], color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_title(panel.title, loc="left", fontsize=10)
        tidy(axes)
    names = [name for name in STYLE if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, grid


def _sizes(panel: Panel) -> list[float]:
    return sorted({size for line in panel.lines.values() for size in line})


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
