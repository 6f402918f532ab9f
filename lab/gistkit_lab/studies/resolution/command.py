"""The command of the study `resolution`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.processes import launched
from gistkit.evaluate.report import format_table
from gistkit.nn import IMAGE_ENCODINGS
from gistkit.options.arguments import whole
from gistkit.train import checkpoints
from gistkit_lab.studies.options import add_names, add_runs, jobs
from gistkit_lab.studies.pages import drop_column, machine_caption, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.resolution import report
from gistkit_lab.studies.resolution.folders import Files
from gistkit_lab.studies.resolution.images import load_images
from gistkit_lab.studies.resolution.study import ABLATIONS, ARMS, NOTES, PRESETS, Recipe, Run, arms, train
from gistkit_lab.studies.runner import cores
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ResolutionStudy(Study):
    """Image classifiers at larger images than they were trained on."""

    name = "resolution"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    shared = True
    train_run = staticmethod(train)
    kind = "images"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--preset", choices=PRESETS, default="short",
            help="quick: seconds a run; short: trained on a grid of 8 x 8 patches and tested on up to 24 x 24, minutes "
            "a run on a CPU; canvas, ours: images keep their size on a canvas of 6 x 6 to 18 x 18 patches, a minute a "
            "run; seqpe-imagenet: ViT-S, trained on 224 x 224 pixels, on a GPU (default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--data", default="digits",
            help="digits (scikit-learn's), fashion-mnist (Debian's dataset-fashion-mnist), a folder of IDX files with "
            "MNIST's names, or one in ImageNet's layout, train/CLASS/*.JPEG and val/CLASS/*.JPEG "
            "(default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--workers", type=whole(0, 1000), metavar="N",
            help="processes that read and change a folder's training images while the model trains; results do not "
            "depend on it (default: one for each core but that of training, at most 16)",
        )  # fmt: skip
        add_names(parser, "--encodings", ARMS, IMAGE_ENCODINGS, f", {' and '.join(ABLATIONS)} among them")
        add_runs(parser)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        images = load_images(options.data)
        if isinstance(images.train.images, Files):
            spare = min(16, max(0, cores() // (launched().count * (options.processes or 1)) - 1))
            images = replace(images, workers=spare if options.workers is None else options.workers)
        recipe = self.recipe_for(options).fitted(images)
        # Here what is missing is said before the first run.
        recipe.augment(images.classes)
        first, last = (f"{grid} x {grid}" for grid in (recipe.grids[0], recipe.grids[-1]))
        about = (
            f"Classifiers of {recipe.size} x {recipe.size} pixels, {first} patches, tested on up to {last}: "
            f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}; {images.name}, "
            f"{len(images.train)} training images, {images.digest}"
        )
        about = "\n".join(filter(None, [about, NOTES.get(options.preset)]))
        study_jobs = jobs(arms(options.encodings), options.seeds)
        # A variant shares the results file of the preset that it belongs to.
        file = "short" if self.variant(recipe) else options.preset
        return StudyPlan(recipe, study_jobs, about, images, f"{Path(options.data).name}-{file}")

    def arm_name(self, run: Run) -> str:
        return run.arm

    def small(self, recipe: Recipe) -> bool:
        return recipe.dim <= 128

    def variant(self, recipe: Recipe) -> str:
        return "canvas" if recipe.object_grid else ""

    def recipe_of(self, values: dict[str, Any]) -> Recipe:
        return Recipe(**values | {"grids": tuple(values["grids"])})

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        return "\n\n".join(map(format_table, [report.table_rows(runs), *_paper(recipe)]))

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return (
            f"Accuracy in percent, held-out images:\n{format_table(report.table_rows(runs, 'held_out'))}\n\n"
            f"Accuracy in percent, images that no choice was made on:\n{self.table(runs, plan.recipe)}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables: list[str] = []
        paper: list[list[list[str]]] = []
        for group in groups:
            recipe = group[0].recipe
            paper = paper or _paper(recipe)
            rows = drop_column(report.table_rows(runs(group)), "training")
            rows[0][0] = group[0].source.split()[-1]
            how = f"{recipe.steps} steps of {recipe.batch} images of {recipe.size} x {recipe.size} pixels"
            if recipe.object_grid:
                rows[0][0] += " on a canvas (ours)"
                how += f", in which {recipe.image_size(0)} x {recipe.image_size(0)} are the image's at every size"
            tables.append(
                f"{format_table(rows)}\n\nAccuracy in percent, images on which nothing was chosen; {how}. "
                f"{machine_caption(group)}."
            )
        return "\n\n".join([*tables, *map(format_table, paper)])

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs, with_paper=not self.variant(recipe))

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        embedded = dict.fromkeys(
            job.arm.name for job in plan.jobs if job.arm.name == "learned-2d" or job.arm.name.startswith("seqpe")
        )
        states = {arm: path for arm in embedded if checkpoints.find(path := out / f"{arm}-0")}
        return [report.draw_embeddings(out / "similarity.png", plan.recipe, states)] if states else []


def _paper(recipe: Recipe) -> list[list[list[str]]]:
    """The paper's rows beside what the paper does too."""
    return [] if recipe.object_grid else [report.paper_rows()]


STUDY = ResolutionStudy()
