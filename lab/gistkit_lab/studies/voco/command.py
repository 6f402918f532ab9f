"""The command of the study `voco`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gistkit.evaluate.report import format_table
from gistkit.layouts.positions import SCHEMES
from gistkit.options.arguments import names
from gistkit.train import checkpoints
from gistkit_lab.studies.options import add_names, add_runs, jobs
from gistkit_lab.studies.pages import drop_column, machine_caption, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.resolution.folders import Files
from gistkit_lab.studies.resolution.images import load_images
from gistkit_lab.studies.study import Study, StudyPlan
from gistkit_lab.studies.voco import report
from gistkit_lab.studies.voco.runs import Run, train
from gistkit_lab.studies.voco.study import (
    DEFAULT_DATA,
    DEFAULT_LAYOUTS,
    DEFAULT_RATIOS,
    METHODS,
    PRESETS,
    RATIOS,
    Arm,
    Recipe,
    arms,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class VoCoStudy(Study):
    """Answers about where items are in an image, from VoCo tokens under each position layout."""

    name = "voco"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    train_run = staticmethod(train)
    kind = "images"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--preset", choices=PRESETS, default="quick",
            help="quick: 144 vision tokens, some 20 minutes of a core, an hour for three seeds; short: the same, "
            "trained seven times as long, hours; paper: 576 vision tokens, on a GPU (default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--data",
            help="items of the mosaics: digits (scikit-learn's), fashion-mnist (Debian's dataset-fashion-mnist), or a "
            "folder of IDX files with MNIST's names (default: digits; fashion-mnist for paper)",
        )  # fmt: skip
        add_names(
            parser, "--methods", METHODS, METHODS, "; full: all vision tokens; none: no image; avgpool: means of some"
        )
        parser.add_argument(
            "--layouts", type=names(*SCHEMES, empty=True),
            help=f"position layouts of VoCo tokens, comma-separated (default: dpl,epl; {','.join(SCHEMES)} for short "
            "and paper)",
        )  # fmt: skip
        parser.add_argument(
            "--ratios", type=names(*RATIOS),
            help="vision tokens a token that is left, comma-separated (default: 4.5,16,72; 4.5,16,72,144 for short; "
            "4.5,16,72,288 for paper)",
        )  # fmt: skip
        add_runs(parser)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe, preset = self.recipe_for(options), options.preset
        layouts = DEFAULT_LAYOUTS[preset] if options.layouts is None else options.layouts
        ratios = [float(ratio) for ratio in options.ratios or DEFAULT_RATIOS[preset]]
        data = options.data or DEFAULT_DATA[preset]
        images = load_images(data)
        if isinstance(images.train.images, Files):
            raise ValueError(f"--data: expected digits, fashion-mnist or a folder of IDX files, got {str(data)!r}")
        study_arms = arms(options.methods, layouts, ratios)
        try:
            left = {arm.tokens(recipe): None for arm in study_arms if arm.ratio > 1}
        except ValueError as error:
            raise ValueError(f"--ratios: {error}") from error
        about = (
            f"Mosaics of {recipe.side} x {recipe.side} items, {recipe.vision_tokens} vision tokens, of which "
            f"{', '.join(map(str, left)) or 'all'} are left; {len(study_arms)} arms of {recipe.steps} steps of "
            f"{recipe.batch} after {recipe.base_steps} with all; {images.name}, {len(images.train)} training items, "
            f"{images.digest}"
        )
        return StudyPlan(recipe, jobs(study_arms, options.seeds), about, images, f"{Path(data).name}-{preset}")

    def arm_name(self, run: Run) -> str:
        return Arm(run.method, run.ratio).name

    def small(self, recipe: Recipe) -> bool:
        return recipe.dim <= 128

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        tables = (report.table_rows(runs, recipe), report.gain_rows(runs), report.paper_rows())
        return "\n\n".join(format_table(rows) for rows in tables if len(rows) > 1)

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return (
            "Right answers in percent, mosaics of held-out items:\n"
            f"{format_table(report.table_rows(runs, plan.recipe, 'held_out'))}\n\n"
            "Right answers in percent, mosaics of items that no choice was made on:\n"
            f"{self.table(runs, plan.recipe)}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe: Recipe = group[0].recipe
            rows = drop_column(report.table_rows(runs(group), recipe), "training")
            how = (
                f"mosaics of {recipe.side} x {recipe.side}, {group[0].source}, on which nothing was chosen; "
                f"{recipe.steps} steps of {recipe.batch} mosaics and {recipe.questions} questions each, after "
                f"{recipe.base_steps} with all vision tokens"
            )
            tables.append(f"{format_table(rows)}\n\nRight answers in percent, {how}. {machine_caption(group)}.")
            if len(gains := report.gain_rows(runs(group))) > 1:
                tables.append(f"{format_table(gains)}\n\nIn points, seed by seed: mean (lowest to highest).")
        return "\n\n".join([*tables, format_table(report.paper_rows())])

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs, recipe)

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        # The arms of the lowest ratio, where there is most to see, as far as their states are here.
        study_arms = dict.fromkeys(job.arm for job in plan.jobs if job.arm.method in SCHEMES)
        there = [arm for arm in study_arms if checkpoints.find(out / f"{arm.name}-0")]
        if not there or not checkpoints.find(out / "base-0") or plan.source is None:
            return []
        first = [arm for arm in there if arm.ratio == min(arm.ratio for arm in there)]
        return [report.draw_sight(out / "sight.png", plan.recipe, plan.source, first, out)]  # type: ignore[arg-type]


STUDY = VoCoStudy()
