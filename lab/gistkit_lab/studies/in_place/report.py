"""The results of the study `in-place`: a table beside the paper's, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gistkit_lab.studies import results
from gistkit_lab.studies.in_place.runs import Run
from gistkit_lab.studies.in_place.study import METHODS, OTHER_METHODS, Arm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "no": "No context",
    "full": "Full context",
    "gist": "Gist",
    "offset-gist": "OffsetGist",
    "sep-offset-gist": "SepOffsetGist",
    "avgpool": "AvgPool",
    "gistpool": "GistPool",
    "gistpool-means": "GistPool from means",
    "sep-gist": "SepGist",
    "gist-pool": "Gist with pool mask",
    "sep-gist-pool": "SepGist with pool mask",
    "offset-gist-pool": "OffsetGist with pool mask",
}
# GistPool, Table 3: evaluation loss on SQuAD with Gemma2 2B.
PAPER = {
    "no": {1: 2.139},
    "full": {1: 0.270},
    "gist": {1: 0.512, 2: 0.619, 5: 0.783, 10: 0.925},
    "offset-gist": {1: 0.501, 2: 0.619, 5: 0.739, 10: 0.890},
    "sep-offset-gist": {1: 0.493, 2: 0.547, 5: 0.636, 10: 0.786},
    "avgpool": {2: 0.352, 5: 0.495, 10: 0.702},
    "gistpool": {1: 0.340, 2: 0.357, 5: 0.408, 10: 0.545},
    # Ours: the paper's gists learn to pool by training alone.
    "gistpool-means": {},
    "sep-gist": {1: 0.505, 2: 0.592, 5: 0.732, 10: 0.764},
    "gist-pool": {1: 0.306, 2: 0.337, 5: 0.433, 10: 0.630},
    "sep-gist-pool": {1: 0.355, 2: 0.365, 5: 0.425, 10: 0.547},
    "offset-gist-pool": {1: 0.312, 2: 0.332, 5: 0.453, 10: 0.670},
}


def by_arm(runs: Sequence[Run]) -> dict[Arm, list[Run]]:
    """The runs of each arm, in the order of the methods and by ratio."""
    runs_by_arm: dict[Arm, list[Run]] = {}
    order = METHODS + OTHER_METHODS
    for run in sorted(runs, key=lambda run: (order.index(run.method), run.ratio, run.seed)):
        runs_by_arm.setdefault(Arm(run.method, run.ratio), []).append(run)
    return runs_by_arm


def table_rows(runs: Sequence[Run], split: str = "held_out") -> list[list[str]]:
    """Header and one row an arm: loss and exact match of each kind of question, of "held_out" or "test".

    Several seeds give mean (lowest-highest).
    """
    kinds = [kind for kind in getattr(runs[0], split) if kind != "all"]
    columns = ["all", *(kinds if len(kinds) > 1 else [])]
    header = ["method", "ratio"]
    for kind in columns:
        header += ["loss", "exact"] if kind == "all" else [f"{kind}: loss", f"{kind}: exact"]
    rows = [[*header, "seeds", "paper: SQuAD loss"]]
    for arm, arm_runs in by_arm(runs).items():
        row = [TITLES[arm.method], "-" if arm.method == "no" else f"{arm.ratio}x"]
        for kind in columns:
            for figure in ("loss", "exact"):
                row.append(results.spread([getattr(run, split)[kind][figure] for run in arm_runs]))
        paper = PAPER[arm.method].get(arm.ratio)
        rows.append([*row, str(len(arm_runs)), "-" if paper is None else f"{paper:.3f}"])
    return rows


def format_examples(runs: Sequence[Run], ratio: int = 5) -> str:
    """The answers to one held-out question of each kind, as each method gives them at `ratio` (first seed)."""
    first = {arm.method: arm_runs[0] for arm, arm_runs in by_arm(runs).items() if arm.ratio in (1, ratio)}
    examples = next(iter(first.values())).examples
    lines = []
    for index, example in enumerate(examples[:2]):
        lines.append(f"  {example['question'].strip()!r} -> {example['answer']!r}")
        lines += [f"  {TITLES[method]:>14}  {run.examples[index]['given']!r}" for method, run in first.items()]
    return "\n".join(lines)


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Losses and exact answers against the ratio, and curves of the training."""
    from gistkit_lab.studies.in_place.figures import draw_curves, draw_ratios

    arms = by_arm(runs)
    figures_by_ratio: dict[str, dict[str, dict[int, list[float]]]] = {
        figure: {TITLES[arm.method]: {} for arm in arms} for figure in ("loss", "exact")
    }
    for arm, arm_runs in arms.items():
        for figure, methods in figures_by_ratio.items():
            methods[TITLES[arm.method]][arm.ratio] = [run.held_out["all"][figure] for run in arm_runs]
    paper = {TITLES[method]: {ratio: [loss] for ratio, loss in PAPER[method].items()} for method in PAPER}
    panels = {
        "held-out loss (nats a token)": figures_by_ratio["loss"],
        "answers without a wrong token": figures_by_ratio["exact"],
        "paper: loss on SQuAD, Gemma2 2B": {title: paper[title] for title in figures_by_ratio["loss"] if paper[title]},
    }
    curves = {(TITLES[arm.method], arm.ratio): [run.curve for run in arm_runs] for arm, arm_runs in arms.items()}
    return {"ratios": draw_ratios(panels), "curves": draw_curves(curves)}
