"""The results of the study `length`: a table beside the paper's, and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from gistkit.common.files import write_picture
from gistkit.train import checkpoints
from gistkit_lab.studies.extrapolation import student as extrapolation
from gistkit_lab.studies.extrapolation.report import TITLES, arm_lines, arm_rows, number, paper_lines
from gistkit_lab.studies.length.study import Recipe, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# SeqPE, Tables I and IV: perplexity on WikiText-103 at 1x, 2x, .. of 512 tokens.
PAPER = {
    "nope": (20.40, 34.98, 116.11, 289.73, 536.29, 881.56),
    "sinusoidal": (23.37, 77.86, 628.68, 2.3e3, 5.0e3, 9.4e3),
    "learned": (20.30, 21.36, 37.70, 86.90, 152.53, 230.63),
    "rope-1e4": (19.44, 35.25, 113.17, 252.15, 477.89, 745.52),
    "rope-1e6": (19.46, 30.18, 92.01, 201.57, 332.04, 539.20),
    "rope-1e8": (19.42, 42.92, 144.71, 341.40, 541.17, 786.08),
    "alibi": (20.06, 19.06, 18.65, 18.72, 19.36, 21.39),
    "seqpe-bias": (19.65, 18.74, 18.51, 18.58, 18.86, 19.37),
    "seqpe-bias-no-delta": (19.57, 33.81, 104.07, 205.33),
    "seqpe-bias-no-ood": (19.62, 18.78, 18.56, 18.62),
    "seqpe-bias-no-delta-no-ood": (19.57, 23.57, 60.51, 125.32),
}


def table_rows(runs: Sequence[Run], split: str = "test") -> list[list[str]]:
    """Header and one row an arm: perplexity at each length; several seeds give mean (lowest-highest)."""
    return arm_rows(runs, split, math.exp, number)


def paper_rows() -> list[list[str]]:
    """The paper's figures."""
    header = ["paper: WikiText-103", *[f"{1 << power}x, {512 << power}" for power in range(6)]]
    rows = [[TITLES[arm], *map(number, row)] for arm, row in PAPER.items()]
    return [header, *[row + ["-"] * (len(header) - len(row)) for row in rows]]


def figures(runs: Sequence[Run], split: str = "test") -> dict[str, Figure]:
    """Perplexity against the length, ours and the paper's."""
    from gistkit_lab.studies.extrapolation.figures import Panel, draw_lengths

    panels = [
        Panel("perplexity", arm_lines(runs, split, math.exp)),
        Panel("paper: GPT-2 on WikiText-103", paper_lines(runs, PAPER, 512, lambda value: value)),
    ]
    return {"length": draw_lengths(panels, "Language models at longer texts than they were trained on")}


def draw_embeddings(path: Path, recipe: Recipe, states: Mapping[str, Path]) -> Path:
    """How alike the embeddings of positions are before training and after it, as a PNG file (SeqPE, Figure 2).

    Args:
        states: by arm, the folder of its run.
    """
    from gistkit_lab.viz.similarity import draw_similarity

    embeddings: dict[str, Any] = {}
    positions = min(2048, recipe.base**recipe.digits)
    for arm, state in states.items():
        student = extrapolation.Student(recipe, extrapolation.arms([arm])[0], 256, seed=0)
        encoder = student.encoder
        if encoder is None:
            raise ValueError(f"states: expected arms with an encoder, got {arm!r}")
        with torch.no_grad():
            embeddings.setdefault("before training", encoder.eval().table(positions))
            prefix = "position.encoder."
            weights = load_file(checkpoints.last_whole(state, remove=False) / checkpoints.WEIGHTS)
            encoder.load_state_dict({k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)})
            embeddings[TITLES[arm].removeprefix("SeqPE ")] = encoder.table(positions)
    write_picture(path, draw_similarity(embeddings, trained=recipe.length), dpi=100)
    return path
