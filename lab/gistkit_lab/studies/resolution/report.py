"""The results of the study `resolution`: a table beside the paper's, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from gistkit.common.files import write_picture
from gistkit.nn import Learned2D, SeqPEPositions
from gistkit.train import checkpoints
from gistkit_lab.studies import results
from gistkit_lab.studies.resolution.study import ARMS, Arm, Recipe, Run, build_position

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "nope": "NoPE",
    "sinusoidal-2d": "Sinusoidal",
    "learned-2d": "Learned",
    "rope-2d": "RoPE2D",
    "rope-2d-mix": "RoPE2D-Mix",
    "seqpe-sum": "SeqPE AttnSum",
    "seqpe-mul": "SeqPE AttnMul",
    "seqpe-bias": "SeqPE AttnBias",
    "seqpe-mul-no-delta": "SeqPE AttnMul without L_delta",
    "seqpe-mul-no-ood": "SeqPE AttnMul without L_OOD",
    "seqpe-mul-no-delta-no-ood": "SeqPE AttnMul without both losses",
}
PAPER_GRIDS = (14, 20, 24, 28, 32, 40, 42)
# SeqPE, Tables III, V and IV: accuracy in percent of ViT-S on ImageNet-1k, patches of 16 pixels, by grid.
PAPER = {
    "nope": (78.8, 79.2, 78.5, 77.3, 75.8, 71.7, 70.5),
    "sinusoidal-2d": (80.9, 50.3, 33.3, 32.4, 15.2, 8.8, 8.5),
    "learned-2d": (80.4, 80.6, 79.4, 77.6, 75.4, 70.3, 69.1),
    "rope-2d": (80.9, 81.5, 80.0, 78.2, 76.1, 67.8, 65.0),
    "rope-2d-mix": (80.9, 82.2, 81.8, 80.9, 79.1, 71.6, 68.3),
    "seqpe-sum": (80.9, 80.8, 79.8, 78.5),
    "seqpe-mul": (81.2, 81.8, 81.7, 81.2, 80.5, 77.8, 76.7),
    "seqpe-bias": (80.8, 80.9, 80.1, 79.2),
    "seqpe-mul-no-delta": (81.3, 81.3, 79.3, 76.1),
    "seqpe-mul-no-ood": (81.0, 81.2, 80.7, 80.0),
    "seqpe-mul-no-delta-no-ood": (81.1, 81.2, 79.7, 77.1),
}


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each arm, in the order of `ARMS`, by seed."""
    runs_by_arm: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (ARMS.index(run.arm), run.seed)):
        runs_by_arm.setdefault(run.arm, []).append(run)
    return runs_by_arm


def table_rows(runs: Sequence[Run], split: str = "test") -> list[list[str]]:
    """Header and one row an arm: accuracy in percent on each grid; several seeds give mean (lowest-highest)."""
    grids = list(getattr(runs[0], split))
    rows = [["position encoding", *_columns([int(grid) for grid in grids]), "training", "seeds"]]
    for arm, arm_runs in by_arm(runs).items():
        cells = [
            results.spread([100 * getattr(run, split)[grid] for run in arm_runs], "{:.1f}".format) for grid in grids
        ]
        seconds = results.spread([run.seconds for run in arm_runs], "{:.0f} s".format)
        rows.append([TITLES[arm], *cells, seconds, str(len(arm_runs))])
    return rows


def paper_rows() -> list[list[str]]:
    """The paper's figures, as `table_rows`."""
    rows = [["paper: ViT-S on ImageNet", *_columns(PAPER_GRIDS)]]
    for arm, figures in PAPER.items():
        missing = len(PAPER_GRIDS) - len(figures)
        rows.append([TITLES[arm], *[f"{figure:.1f}" for figure in figures], *["-"] * missing])
    return rows


def figures(runs: Sequence[Run], split: str = "test", *, with_paper: bool = True) -> dict[str, Figure]:
    """Accuracy against the size, ours and, where it has such figures, the paper's."""
    from gistkit_lab.studies.extrapolation.figures import Panel, draw_sizes

    arms = by_arm(runs)
    smallest = min(int(grid) for grid in getattr(runs[0], split))
    accuracies = {
        TITLES[arm]: {
            int(grid) / smallest: [100 * getattr(run, split)[grid] for run in arm_runs]
            for grid in getattr(arm_runs[0], split)
        }
        for arm, arm_runs in arms.items()
    }
    panels = [Panel("accuracy (%)", accuracies)]
    if with_paper:
        paper = {
            TITLES[arm]: {grid / PAPER_GRIDS[0]: [value] for grid, value in zip(PAPER_GRIDS, PAPER[arm], strict=False)}
            for arm in arms
        }
        panels.append(Panel("paper: ViT-S on ImageNet", paper))
    return {"resolution": draw_sizes(panels, "Image classifiers at larger sizes than they were trained at")}


def draw_embeddings(path: Path, recipe: Recipe, states: Mapping[str, Path]) -> Path:
    """How alike the embeddings of some cells of the training grid are with all, as a PNG file (SeqPE, Figure 3).

    Args:
        recipe: of the runs.
        states: by arm, the folder of its run; of SeqPE's arms and of "learned-2d".
    """
    from gistkit_lab.viz.grids import draw_grid_similarity

    embeddings: dict[str, Any] = {}
    for arm, state in states.items():
        position = build_position(recipe, Arm(arm)).eval()
        prefix = "position."
        weights = load_file(checkpoints.last_whole(state, remove=False) / checkpoints.WEIGHTS)
        position.load_state_dict({k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)})
        if isinstance(position, SeqPEPositions):
            with torch.no_grad():
                embeddings[TITLES[arm]] = position.encoder.table(recipe.grids[0], recipe.grids[0])
        elif isinstance(position, Learned2D):
            embeddings[TITLES[arm]] = position.table.detach()
        else:
            raise ValueError(f"states: expected arms with an embedding of each position, got {arm!r}")
    write_picture(path, draw_grid_similarity(embeddings), dpi=100)
    return path


def _columns(grids: Sequence[int]) -> list[str]:
    return [f"{grid / grids[0]:.3g}x, {grid}x{grid}" for grid in grids]
