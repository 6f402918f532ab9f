"""The picture of the study `compression-loss`: how soon each setting learns to reconstruct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from gistkit.viz.style import OTHER_STYLES, Picture, legend_beside, tidy
from gistkit_lab.studies.compression_loss.study import SETTINGS

TICKS = (0.2, 0.5, 1, 2, 5)
Curves = Mapping[str, Sequence[ArrayLike]]


def draw_fine_tuning(steps: Curves, seconds: Curves) -> Figure:
    """Held-out AE loss, a line a setting (of `SETTINGS`), with a band from lowest to highest over seeds.

    Args:
        steps: for each setting its seeds' curves [n, 2] of (step of fine-tuning, loss): the left panel.
        seconds: the same of (second of training, loss), pretraining included: the right panel.
    """
    figure = Picture(figsize=(10.4, 3.8), layout="constrained", dpi=120)
    panels = figure.subplots(1, 2, sharey=True)
    names = {"step of fine-tuning on the AE loss": steps, "second of training, pretraining included": seconds}
    for axes, (name, curves) in zip(panels, names.items(), strict=True):
        for setting, seeds in curves.items():
            style = OTHER_STYLES[list(SETTINGS).index(setting)]
            points = np.array(seeds, dtype=float)
            at, losses = points[..., 0].mean(0), points[..., 1]
            axes.plot(at, losses.mean(0), label=SETTINGS[setting].title, markersize=4, markevery=2, **style)
            if len(seeds) > 1:
                axes.fill_between(at, losses.min(0), losses.max(0), color=style["color"], alpha=0.2, linewidth=0)
        axes.set(xlabel=name, yscale="log")
        tidy(axes)
    panels[0].set_yticks(TICKS, map(str, TICKS))
    panels[0].minorticks_off()
    panels[0].set_ylabel("held-out AE loss (nats a byte)")
    panels[0].set_title("Reconstructing, after pretraining under each setting", loc="left")
    legend_beside(panels[1])
    return figure
