"""The results of the study `retrieval`: tables beside the paper's, and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gistkit_lab.studies.extrapolation.report import TITLES, arm_lines, arm_rows, number, paper_lines
from gistkit_lab.studies.retrieval.study import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# SeqPE, Table II: perplexity and exact match in percent on RULER's SQuAD at 1x, 2x, .. of 1024 tokens.
PAPER = {
    "nope": ((6.07, 29.2), (236.53, 3.6), (967.89, 0.6), (1.5e4, 0.0)),
    "sinusoidal": ((7.66, 26.2), (577.48, 1.8), (1.5e4, 0.0), (1.5e6, 0.0)),
    "learned": ((6.79, 25.0), (15.66, 11.8), (41.30, 6.2), (365.49, 0.2)),
    "rope-1e6": ((5.62, 28.0), (23.00, 9.0), (314.77, 3.0), (963.48, 0.8)),
    "alibi": ((5.49, 23.8), (8.07, 11.4), (9.52, 8.0), (121.14, 2.0)),
    "seqpe-bias": ((5.56, 26.8), (7.64, 15.0), (7.58, 11.4), (28.60, 2.6)),
}


def table_rows(runs: Sequence[Run], figure: str, split: str = "test") -> list[list[str]]:
    """Header and one row an arm at each length: "perplexity" of the answers, or "exact", the share without error."""
    if figure == "exact":
        return arm_rows(runs, split, lambda figures: figures["exact"], "{:.3f}".format)
    return arm_rows(runs, split, lambda figures: math.exp(figures["loss"]), number)


def paper_rows() -> list[list[str]]:
    """The paper's figures: perplexity / exact match in percent."""
    header = ["paper: RULER SQuAD", *[f"{1 << power}x, {1024 << power}" for power in range(4)]]
    cells = {arm: [f"{number(loss)} / {exact}" for loss, exact in row] for arm, row in PAPER.items()}
    return [header, *[[TITLES[arm], *row] for arm, row in cells.items()]]


def figures(runs: Sequence[Run], split: str = "test") -> dict[str, Figure]:
    """Perplexity and exact answers against the length, and the paper's."""
    from gistkit_lab.studies.extrapolation.figures import Panel, draw_lengths

    panels = [
        Panel("perplexity of the answers", arm_lines(runs, split, lambda values: math.exp(values["loss"]))),
        Panel("right answers", arm_lines(runs, split, lambda values: values["exact"]), logarithmic=False),
        Panel("paper: perplexity, RULER SQuAD", paper_lines(runs, PAPER, 1024, lambda value: value[0])),
    ]
    return {"retrieval": draw_lengths(panels, "Looking up facts in longer contexts than in training")}
