"""The results of the study `voco`: tables beside the paper's, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from gistkit.layouts.positions import SCHEMES
from gistkit_lab.studies import results
from gistkit_lab.studies.resolution.images import Images
from gistkit_lab.studies.voco.mosaics import Mosaics
from gistkit_lab.studies.voco.runs import Run, sight, trained_reader
from gistkit_lab.studies.voco.study import METHODS, Arm, Recipe
from gistkit_lab.studies.voco.words import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "full": "all vision tokens",
    "none": "no image",
    "avgpool": "means of vision tokens",
    **{layout: f"VoCo {layout.upper()}" for layout in SCHEMES},
}
ASKED = {"at": "which item is here", "count": "how many of it", "left": "what is left of it"}
ORDER = (*METHODS, *SCHEMES)
# Position IDs Matter, Table 10: VoCo tokens of 576, and the figures of SQA, MMB and VQAv2. A star: as VoCo-LLaMA's
# authors report.
PAPER: tuple[tuple[str, int, tuple[float | None, float, float]], ...] = (
    ("upper bound*", 576, (66.5, 64.0, 77.7)),
    ("DPL*", 128, (None, 61.0, 76.9)),
    ("DPL", 128, (64.9, 59.9, 76.9)),
    ("EPL", 128, (66.5, 64.6, 78.4)),
    ("DPL*", 2, (None, 60.1, 73.5)),
    ("DPL", 2, (66.1, 61.5, 73.7)),
    ("EPL", 2, (67.6, 61.4, 69.5)),
    ("lower bound*", 1, (60.7, 22.3, 41.2)),
)


def by_arm(runs: Sequence[Run]) -> dict[Arm, list[Run]]:
    """The runs of each arm by seed: first those without a ratio, then by ratio and method."""
    runs_by_arm: dict[Arm, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.ratio, ORDER.index(run.method), run.seed)):
        runs_by_arm.setdefault(Arm(run.method, run.ratio), []).append(run)
    return runs_by_arm


def table_rows(runs: Sequence[Run], recipe: Recipe, split: str = "test") -> list[list[str]]:
    """Header and one row an arm: right answers of each kind in percent; several seeds give mean (lowest-highest)."""
    rows = [["the text reads", "ratio", "tokens", *ASKED.values(), "loss", "training", "seeds"]]
    for arm, arm_runs in by_arm(runs).items():
        figures = [getattr(run, split) for run in arm_runs]
        rows.append(
            [
                TITLES[arm.method],
                "-" if arm.method in ("full", "none") else f"{arm.ratio:g}x",
                str(arm.tokens(recipe)),
                *(results.spread([100 * one[kind] for one in figures], "{:.1f}".format) for kind in KINDS),
                results.spread([one["loss"] for one in figures]),
                results.spread([run.seconds for run in arm_runs], "{:.0f} s".format),
                str(len(arm_runs)),
            ]
        )
    return rows


def gain_rows(runs: Sequence[Run], split: str = "test") -> list[list[str]]:
    """Header and a row a ratio: right answers with EPL less those with DPL, in points, seed by seed."""
    rows = [["EPL less DPL", *ASKED.values(), "seeds"]]
    arms = by_arm(runs)
    for ratio in sorted({run.ratio for run in runs}):
        first, other = ({run.seed: run for run in arms.get(Arm(name, ratio), ())} for name in ("epl", "dpl"))
        seeds = sorted(first.keys() & other.keys())
        if seeds:
            gains = [
                [100 * (getattr(first[seed], split)[kind] - getattr(other[seed], split)[kind]) for seed in seeds]
                for kind in KINDS
            ]
            rows.append([f"{ratio:g}x", *(_gain(one) for one in gains), str(len(seeds))])
    return rows


def paper_rows() -> list[list[str]]:
    """The paper's figures."""
    rows = [["paper: LLaVA, 576 vision tokens", "ratio", "tokens", "SQA", "MMB", "VQAv2"]]
    for name, tokens, figures in PAPER:
        cells = ["-" if figure is None else f"{figure:.1f}" for figure in figures]
        rows.append([name, "-" if tokens == 576 else f"{576 / tokens:g}x", str(tokens), *cells])
    return rows


def _gain(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:+.1f}"
    return f"{mean(values):+.1f} ({min(values):+.1f} to {max(values):+.1f})"


def figures(runs: Sequence[Run], recipe: Recipe, split: str = "test") -> dict[str, Figure]:
    """Right answers of each kind by tokens left, and by training steps at each ratio."""
    from gistkit_lab.studies.voco.figures import draw_accuracy, draw_curves

    arms = by_arm(runs)
    lines: dict[str, dict[str, dict[int, list[float]]]] = {ASKED[kind]: {} for kind in KINDS}
    bounds: dict[str, dict[str, float]] = {ASKED[kind]: {} for kind in KINDS}
    for arm, arm_runs in arms.items():
        for kind in KINDS:
            shares = [100 * getattr(run, split)[kind] for run in arm_runs]
            if arm.method in ("full", "none"):
                bounds[ASKED[kind]][TITLES[arm.method]] = mean(shares)
            else:
                lines[ASKED[kind]].setdefault(arm.method, {})[arm.tokens(recipe)] = shares
    pictures = {"accuracy": draw_accuracy(lines, bounds, TITLES)}
    curves = {
        f"{ratio:g}x": {
            TITLES[arm.method]: [[(step, 100 * at) for step, _, at, *_ in run.curve] for run in arm_runs]
            for arm, arm_runs in arms.items()
            if arm.ratio == ratio or arm.method in ("full", "none")
        }
        for ratio in sorted({arm.ratio for arm in arms if arm.method not in ("full", "none")})
    }
    if curves:
        pictures["curves"] = draw_curves(curves, f"{ASKED['at']}: right answers (%)", TITLES)
    return pictures


def draw_sight(path: Path, recipe: Recipe, images: Images, arms: Sequence[Arm], out: Path, tokens: int = 6) -> Path:
    """Where some VoCo tokens of trained arms look on a held-out mosaic, an arm a row, as a PNG file.

    Args:
        recipe, images: of the runs of seed 0.
        arms: with VoCo tokens, as many each.
        out: with the runs' states.
        tokens: how many of them, spread over all.
    """
    from gistkit_lab.studies.voco.figures import draw_maps

    batch = Mosaics(images, recipe, 0).split("held_out", 1)
    maps = {TITLES[arm.method]: sight(trained_reader(recipe, arm, 0, images, out), recipe, batch) for arm in arms}
    count = arms[0].tokens(recipe)
    chosen = sorted({round(at * (count - 1) / max(1, tokens - 1)) for at in range(tokens)})
    picture = batch.pixels[0].mean(0).numpy()
    title = (
        f"Attention of {len(chosen)} of {count} VoCo tokens over a mosaic, {arms[0].ratio:g}x; mean of layers, heads"
    )
    draw_maps({name: one[chosen].numpy() for name, one in maps.items()}, chosen, picture, title).savefig(path, dpi=120)
    return path
