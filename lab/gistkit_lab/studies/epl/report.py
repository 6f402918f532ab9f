"""The results of the study `epl`: a table beside the paper's, passages and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from gistkit_lab.studies.reconstruction import GOAL, ReconstructionRecipe, Run
from gistkit_lab.studies.results import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Position IDs Matter, Llama-3.2-1B at 5x: autoencoding BLEU-4, continuation perplexity, out-of-domain QA F1.
PAPER = {
    "icae": {"dpl": (31.80, 12.18, 39.95), "upl": (72.35, 11.50, 43.67), "epl": (95.98, 11.42, 43.87)},
    "x500": {"dpl": (93.73, 11.22, 45.76), "upl": (95.86, 10.94, 46.83), "epl": (98.50, 10.80, 48.03)},
}

LIMITS = (
    "What this does not show: one small model trained from scratch, so encoder and decoder share all weights (the "
    "paper\nadapts a frozen language model); no run is trained to convergence, so the layouts differ in how soon they "
    "learn, not\nnecessarily in where they end."
)


def table_rows(runs: Sequence[Run], method: str = "icae") -> list[list[str]]:
    """Header and one row a layout, the paper's figures for `method` last; several seeds give mean (lowest-highest)."""
    rows = [
        [
            "layout",
            f"steps to loss {GOAL}",
            "AE loss",
            "accuracy",
            "greedy",
            "training",
            "paper: AE BLEU-4",
            "LM PPL",
            "QA F1",
        ],
    ]
    for layout in dict.fromkeys(run.layout for run in runs):
        layout_runs = [run for run in runs if run.layout == layout]
        reached = [run.steps_to_goal for run in layout_runs]
        steps_reached = [float(step) for step in reached if step is not None]
        steps = spread(steps_reached, "{:.0f}".format) if steps_reached else "not reached"
        if steps_reached and len(steps_reached) < len(layout_runs):
            steps += f", {len(layout_runs) - len(steps_reached)} of {len(layout_runs)} not"
        rows.append(
            [
                layout.upper(),
                steps,
                spread([run.loss for run in layout_runs], "{:.3f}".format),
                spread([run.accuracy for run in layout_runs], "{:.3f}".format),
                spread([run.greedy_accuracy for run in layout_runs], "{:.3f}".format),
                spread([run.seconds for run in layout_runs], "{:.0f} s".format),
                *([f"{figure:.2f}" for figure in PAPER[method][layout]] if layout in PAPER[method] else ["-"] * 3),
            ]
        )
    return rows


def format_passages(runs: Sequence[Run]) -> str:
    """The same held-out passage as each layout reconstructs it (first seed), greedily."""
    first = {run.layout: run for run in reversed(runs)}
    lines = [f"  {'text':>5}  {runs[0].passage['original']!r}"]
    lines += [
        f"  {layout.upper():>5}  {first[layout].passage['reconstructed']!r}"
        for layout in dict.fromkeys(r.layout for r in runs)
    ]
    return "\n".join(lines)


def format_tracking(runs: Sequence[Run], recipe: ReconstructionRecipe) -> str:
    """How the memory tokens' attention follows the context, last layer, mean over seeds."""
    lines = [f"  slope of the memory tokens' attention over the context (even coverage: 1/{recipe.ratio})"]
    for layout in dict.fromkeys(run.layout for run in runs):
        trackings = [run.tracking[-1] for run in runs if run.layout == layout]
        slope, fit, own_share = (
            mean(tracking[key] for tracking in trackings) for key in ("slope", "r_squared", "own_segment")
        )
        lines.append(
            f"  {layout.upper():>5}  slope 1/{slope:<6.2f} R^2 {fit:4.2f}   share in its own segment {own_share:4.2f}"
        )
    return "\n".join(lines)


def figures(
    runs: Sequence[Run], recipe: ReconstructionRecipe, *, last_layer: bool = False, legend: str = "position layout"
) -> dict[str, Figure]:
    """Loss curves under a `legend`, and where the runs have them attention maps of all layers or the last."""
    from gistkit.viz import draw_memory_attention
    from gistkit_lab.viz import draw_loss_curves

    layouts = dict.fromkeys(run.layout for run in runs)
    curves = {layout: [run.curve for run in runs if run.layout == layout] for layout in layouts}
    pictures = {"loss": draw_loss_curves(curves, goal=GOAL, legend=legend)}
    maps: dict[str, list[list[list[float]]]] = {}
    for run in runs:
        if run.attention:
            maps.setdefault(run.layout, run.attention[-1:] if last_layer else run.attention)
    if maps:
        first = len(runs[0].tracking) - 1 if last_layer else 0
        pictures["attention"] = draw_memory_attention(maps, recipe.ratio, first)
    return pictures
