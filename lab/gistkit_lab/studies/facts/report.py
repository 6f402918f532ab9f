"""The results of the study `facts`: its tables, and curves of the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gistkit_lab.studies import results
from gistkit_lab.studies.facts.runs import Run
from gistkit_lab.studies.facts.signs import KINDS
from gistkit_lab.studies.facts.study import SELECTIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "full": "Full context",
    "learned": "Dodo learned, in stages",
    "rests": "Dodo learned, at rest in the last",
    "direct": "Dodo learned, from the first step",
    "random": "Dodo random",
    "strided": "Dodo strided",
    "frozen": "Dodo frozen scorer",
    "oracle": "Dodo of values",
}


def by_selection(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each selection, in their order."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (SELECTIONS.index(run.selection), run.seed)):
        found.setdefault(run.selection, []).append(run)
    return found


def table_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row a selection; several seeds give mean (lowest-highest)."""
    rows = [["nuggets", "held-out loss", "test loss", "test: right answers", "values kept", "seeds"]]
    for selection, selected in by_selection(runs).items():
        figures = [("held_out", "loss"), ("test", "loss"), ("test", "exact"), ("test", "kept")]
        cells = [results.spread([getattr(run, split)[figure] for run in selected]) for split, figure in figures]
        rows.append([TITLES[selection], *cells, str(len(selected))])
    return rows


def sign_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row a number of random steps and a ratio: a score's gradient, and what a swap changes, by kind."""
    header = ["random steps before", "ratio"]
    rows = [[*header, *(f"gradient: {kind}" for kind in KINDS), *(f"swap: {kind}" for kind in KINDS), "seeds"]]
    signed = [run for run in runs if run.signs]
    places = [(step, ratio) for step, ratios in signed[0].signs.items() for ratio in ratios] if signed else []
    for step, ratio in places:
        row = [step, f"{ratio}x"]
        for figure in ("gradient", "swap"):
            for kind in KINDS:
                values = [1000 * run.signs[step][ratio][kind][figure] for run in signed]
                row.append(results.spread(values, "{:+.1f}".format))
        rows.append([*row, str(len(signed))])
    return rows


def figures(runs: Sequence[Run], values: int) -> dict[str, Figure]:
    """Held-out loss against training steps, a line a selection; `values`: among how many an answer is."""
    from gistkit_lab.viz import draw_loss_curves

    curves = {TITLES[name]: [run.curve for run in selected] for name, selected in by_selection(runs).items()}
    figure = draw_loss_curves(curves, goal=round(math.log(values), 2), legend="nuggets")
    figure.axes[0].set_title("Looking facts up among filler", loc="left")
    return {"curves": figure}
