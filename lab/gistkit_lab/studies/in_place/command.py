"""The command of the study `in-place`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gistkit.evaluate.report import format_table
from gistkit.train.data import load_corpus
from gistkit_lab.studies.in_place import report
from gistkit_lab.studies.in_place.runs import Run, train
from gistkit_lab.studies.in_place.study import METHODS, OTHER_METHODS, PRESETS, RATIOS, Arm, Recipe, arms
from gistkit_lab.studies.models import add_preset
from gistkit_lab.studies.options import add_names, add_runs, add_text, jobs
from gistkit_lab.studies.pages import machine_caption, model_line, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class InPlaceStudy(Study):
    """Answering from a context that each method compresses in place."""

    name = "in-place"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_preset(parser, PRESETS)
        more = "; gistpool-means is GistPool with gists that begin as means of their windows, and there are "
        add_names(parser, "--methods", METHODS + OTHER_METHODS, METHODS, more + ", ".join(OTHER_METHODS))
        ratios = [str(ratio) for ratio in RATIOS]
        add_names(parser, "--ratios", ratios, ratios)
        add_text(parser, "text file to ask about")
        add_runs(parser)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe = self.recipe_for(options)
        corpus = load_corpus(options.text)
        study_arms = arms(options.methods, [int(ratio) for ratio in options.ratios])
        about = (
            f"Answering from contexts of {recipe.min_length} to {recipe.max_length} tokens, {len(study_arms)} arms of "
            f"{recipe.steps} steps of {recipe.batch}; text {corpus.name}, {corpus.digest}"
        )
        return StudyPlan(recipe, jobs(study_arms, options.seeds), about, corpus, options.preset)

    def arm_name(self, run: Run) -> str:
        return Arm(run.method, run.ratio).name

    def small(self, recipe: Recipe) -> bool:
        return recipe.model == "small"

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        return format_table(report.table_rows(runs, "test"))

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return (
            f"Held-out questions:\n{format_table(report.table_rows(runs, 'held_out'))}\n\n"
            f"Questions that no choice was made on:\n{self.table(runs, plan.recipe)}\n\n"
            f"Held-out questions, as they were answered:\n{report.format_examples(runs)}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe = group[0].recipe
            how = (
                f"{recipe.steps} steps of {recipe.batch} contexts of {recipe.min_length} to {recipe.max_length} tokens"
            )
            tables.append(
                f"{self.table(runs(group), recipe)}\n\n{model_line(recipe)}; test split, on which nothing was chosen; "
                f"{how}. {machine_caption(group)}."
            )
        return "\n\n".join(tables)

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


STUDY = InPlaceStudy()
