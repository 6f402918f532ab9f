"""What the study `epl` found: a table beside the paper's, passages, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from gistkit.info import machine
from gistkit.studies import results
from gistkit.studies.epl import Recipe
from gistkit.studies.results import spread
from gistkit.studies.runs import GOAL, Run, Schedule
from gistkit.train.data import Corpus

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
        mine = [run for run in runs if run.layout == layout]
        reached = [run.steps_to_goal for run in mine]
        known = [float(step) for step in reached if step is not None]
        steps = spread(known, "{:.0f}".format) if known else "not reached"
        if known and len(known) < len(mine):
            steps += f", {len(mine) - len(known)} of {len(mine)} not"
        rows.append(
            [
                layout.upper(),
                steps,
                spread([run.loss for run in mine], "{:.3f}".format),
                spread([run.accuracy for run in mine], "{:.3f}".format),
                spread([run.greedy_accuracy for run in mine], "{:.3f}".format),
                spread([run.seconds for run in mine], "{:.0f} s".format),
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


def format_tracking(runs: Sequence[Run], recipe: Schedule) -> str:
    """How the memory tokens' attention follows the context, last layer, mean over seeds."""
    lines = [f"  slope of the memory tokens' attention over the context (even coverage: 1/{recipe.ratio})"]
    for layout in dict.fromkeys(run.layout for run in runs):
        last = [run.tracking[-1] for run in runs if run.layout == layout]
        slope, fit, own = (mean(one[key] for one in last) for key in ("slope", "r_squared", "own_segment"))
        lines.append(
            f"  {layout.upper():>5}  slope 1/{slope:<6.2f} R^2 {fit:4.2f}   share in its own segment {own:4.2f}"
        )
    return "\n".join(lines)


def write_json(path: Path, runs: Sequence[Run], recipe: Schedule, corpus: Corpus, study: str = "epl") -> None:
    """Everything measured, with the recipe, the text and the machine."""
    text = {
        "name": corpus.name,
        "digest": corpus.digest,
        f"train_{corpus.unit}": corpus.train.numel(),
        f"held_out_{corpus.unit}": corpus.held_out.numel(),
    }
    found = [asdict(run) | {"steps_to_goal": run.steps_to_goal} for run in runs]
    content = {"study": study, "machine": machine(), "text": text, "recipe": asdict(recipe), "runs": found}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_json(path: Path, recipe: Callable[..., Any] = Recipe) -> tuple[list[Run], Any]:
    """The runs that `write_json` wrote, or a benchmark of one run, and what `recipe` makes of their recipe."""
    content = json.loads(path.read_text())
    found = content["runs"] if "runs" in content else [content["run"]]
    runs = [Run(**{key: value for key, value in run.items() if key != "steps_to_goal"}) for run in found]
    return runs, recipe(**content["recipe"])


def figures(
    runs: Sequence[Run], recipe: Schedule, *, last_layer: bool = False, legend: str = "position layout"
) -> dict[str, Figure]:
    """Loss curves under a `legend`, and where the runs have them attention maps of all layers or the last."""
    from gistkit.viz import draw_loss_curves, draw_memory_attention

    layouts = dict.fromkeys(run.layout for run in runs)
    curves = {layout: [run.curve for run in runs if run.layout == layout] for layout in layouts}
    found = {"loss": draw_loss_curves(curves, goal=GOAL, legend=legend)}
    maps: dict[str, list[list[list[float]]]] = {}
    for run in runs:
        if run.attention:
            maps.setdefault(run.layout, run.attention[-1:] if last_layer else run.attention)
    if maps:
        first = len(runs[0].tracking) - 1 if last_layer else 0
        found["attention"] = draw_memory_attention(maps, recipe.ratio, first)
    return found


def draw(folder: Path, runs: Sequence[Run], recipe: Schedule, *, last_layer: bool = False) -> list[Path]:
    """`figures` as PNG files in `folder`."""
    return results.save(folder, figures(runs, recipe, last_layer=last_layer))
