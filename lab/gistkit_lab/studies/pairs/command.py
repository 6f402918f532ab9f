"""The command of the study `pairs`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gistkit.evaluate.report import format_table
from gistkit_lab.studies.in_place import report
from gistkit_lab.studies.in_place.runs import Run
from gistkit_lab.studies.in_place.study import METHODS as ALL_METHODS
from gistkit_lab.studies.in_place.study import OTHER_METHODS, RATIOS, Arm, arms
from gistkit_lab.studies.options import add_names, add_runs, jobs
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.pairs.runs import train
from gistkit_lab.studies.pairs.study import METHODS, PRESETS, Recipe
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PairsStudy(Study):
    """Looking up keys and values in a context that each method compresses in place."""

    name = "pairs"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--preset", choices=PRESETS, default="quick",
            help="quick: contexts of 30 tokens, some 30 minutes of a core a seed; varied: of 16 to 40 tokens (default: "
            "%(default)s)",
        )  # fmt: skip
        # Here gists learn to pool by training alone.
        choices = [method for method in ALL_METHODS + OTHER_METHODS if method != "gistpool-means"]
        others = [method for method in choices if method not in METHODS]
        add_names(parser, "--methods", choices, METHODS, f"; there are also {', '.join(others)}")
        ratios = [str(ratio) for ratio in RATIOS]
        add_names(parser, "--ratios", ratios, ratios)
        parser.add_argument("--gated", action="store_true", help="layers with gates, as Llama's")
        parser.add_argument(
            "--one-text", action="store_true", help="the keys are one text, in place of each being asked alone"
        )
        add_runs(parser)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe = replace(self.recipe_for(options), gated=options.gated, alone=not options.one_text)
        study_arms = arms(options.methods, [int(ratio) for ratio in options.ratios])
        about = (
            f"Contexts of {recipe.fewest} to {recipe.most} pairs of {recipe.keys} keys and {recipe.values} values, "
            f"{len(study_arms)} arms of {recipe.steps} steps of {recipe.batch} after {recipe.base_steps} on the full "
            "context"
        )
        return StudyPlan(recipe, jobs(study_arms, options.seeds), about, None, options.preset)

    def arm_name(self, run: Run) -> str:
        return Arm(run.method, run.ratio).name

    def small(self, recipe: Recipe) -> bool:
        return recipe.dim <= 128

    def variant(self, recipe: Recipe) -> str:
        return "-".join(["gated"] * recipe.gated + ["text"] * (not recipe.alone))

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        return format_table(report.table_rows(runs, "test"))

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return (
            f"Held-out contexts:\n{format_table(report.table_rows(runs, 'held_out'))}\n\n"
            f"Contexts that no choice was made on:\n{self.table(runs, plan.recipe)}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe: Recipe = group[0].recipe
            length = (
                f"{2 * recipe.most}" if recipe.fewest == recipe.most else f"{2 * recipe.fewest} to {2 * recipe.most}"
            )
            tables.append(
                f"{self.table(runs(group), recipe)}\n\nLoss in nats an answer among {recipe.values}, and the share of "
                f"right answers, on contexts on which nothing was chosen; {length} tokens; {recipe.steps} steps of "
                f"{recipe.batch} after {recipe.base_steps} on the full context that the arms share"
                f"{', layers with gates' if recipe.gated else ''}{'' if recipe.alone else ', keys in one text'}. "
                f"{machine_caption(group)}."
            )
        return "\n\n".join(tables)

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


STUDY = PairsStudy()
