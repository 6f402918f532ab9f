"""Pictures of the studies `length` and `retrieval`: figures against the length that is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, Picture, tidy

STYLE: dict[str, dict[str, Any]] = {
    "NoPE": {"color": COLOURS["grey"], "linestyle": ":", "marker": "x"},
    "Sinusoidal": {"color": COLOURS["yellow"], "linestyle": "--", "marker": "s"},
    "Learned": {"color": COLOURS["orange"], "linestyle": "--", "marker": "D"},
    "RoPE 1e4": {"color": COLOURS["red"], "linestyle": "-.", "marker": "^"},
    "RoPE 1e6": {"color": COLOURS["red"], "linestyle": "--", "marker": "v"},
    "RoPE 1e8": {"color": COLOURS["red"], "linestyle": ":", "marker": "<"},
    "ALiBi": {"color": COLOURS["green"], "linestyle": "-", "marker": "P"},
    "SeqPE AttnSum": {"color": COLOURS["sky"], "linestyle": "--", "marker": "p"},
    "SeqPE AttnMul": {"color": COLOURS["purple"], "linestyle": "--", "marker": "h"},
    "SeqPE AttnBias": {"color": COLOURS["blue"], "linestyle": "-", "marker": "o"},
    "SeqPE AttnBias without L_delta": {"color": COLOURS["black"], "linestyle": ":", "marker": "o"},
    "SeqPE AttnBias without L_OOD": {"color": COLOURS["black"], "linestyle": "--", "marker": "o"},
}


@dataclass(frozen=True)
class Panel:
    """One figure of several encodings.

    Args:
        title: what is shown, and where.
        lines: {encoding, as in `STYLE`: {length: the seeds' values}}.
        logarithmic: the vertical axis.
    """

    title: str
    lines: Mapping[str, Mapping[int, Sequence[float]]]
    logarithmic: bool = True


def draw_lengths(panels: Sequence[Panel], title: str) -> Figure:
    """A panel a figure: its mean over seeds against the length, a line an encoding, with bars from lowest to highest.

    The shortest length of a panel is that of training, and has a thin vertical line.
    """
    figure = Picture(figsize=(2.4 + 3.5 * len(panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    shown: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        lengths = sorted({length for line in panel.lines.values() for length in line})
        for name, line in panel.lines.items():
            at = sorted(line)
            means = np.array([np.mean(line[length]) for length in at])
            reach = np.abs([[np.min(line[length]), np.max(line[length])] for length in at] - means[:, None]).T
            bars = axes.errorbar(at, means, reach, markersize=4.5, linewidth=1.3, capsize=2, **STYLE[name])
            shown.setdefault(name, bars)
        axes.axvline(lengths[0], color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_short(length) for length in lengths])
        axes.minorticks_off()
        if panel.logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.02)
        axes.set_xlabel("tokens in a chunk (dotted: in training)")
        axes.set_title(panel.title, loc="left", fontsize=10)
        tidy(axes)
    names = [name for name in STYLE if name in shown]
    figure.legend([shown[name] for name in names], names, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
