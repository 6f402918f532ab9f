"""The command of the study `facts`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit_lab.studies.facts import report
from gistkit_lab.studies.facts.runs import Run, train
from gistkit_lab.studies.facts.study import PRESETS, SELECTIONS, Recipe, arms
from gistkit_lab.studies.options import add_names, add_runs, jobs
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FactsStudy(Study):
    """Which tokens Dodo keeps of a context in which few matter."""

    name = "facts"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--preset", choices=PRESETS, default="quick",
            help="quick: contexts of 64 tokens with 8 keys and values, some 25 minutes of a core a seed (default: "
            "%(default)s)",
        )  # fmt: skip
        add_names(parser, "--selections", SELECTIONS, SELECTIONS)
        add_runs(parser)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe = self.recipe_for(options)
        study_arms = arms(options.selections)
        about = (
            f"Contexts of {recipe.length} tokens with {recipe.most} keys and values, {len(study_arms)} arms of "
            f"{recipe.steps} steps of {recipe.batch} after {recipe.pairs_steps} and {recipe.base_steps} on the full "
            "context"
        )
        return StudyPlan(recipe, jobs(study_arms, options.seeds), about, None, options.preset)

    def arm_name(self, run: Run) -> str:
        return run.selection

    def recipe_of(self, values: dict[str, Any]) -> Recipe:
        return Recipe(**values | {"ratios": tuple(values["ratios"])})

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        tables = (report.table_rows(runs), report.sign_rows(runs))
        return "\n\n".join(format_table(rows) for rows in tables if len(rows) > 1)

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        return "\n\n".join(_page(group) for group in groups)

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs, recipe.values)


def _page(group: Sequence[SavedRun]) -> str:
    recipe: Recipe = group[0].recipe
    scores = format_table(report.table_rows(runs(group)))
    sign_rows = report.sign_rows(runs(group))
    text = (
        f"{scores}\n\nLoss in nats an answer among {recipe.values}, on contexts of {recipe.length} tokens with "
        f"{recipe.most} keys and values, at {recipe.ratio}x; {recipe.steps} steps of {recipe.batch} after "
        f"{recipe.pairs_steps} and {recipe.base_steps} on the full context that the arms share; in stages: "
        f"{recipe.random_steps} steps with random nuggets, then {', '.join(f'{ratio}x' for ratio in recipe.ratios)}. "
        f"{machine_caption(group)}."
    )
    if len(sign_rows) == 1:
        return text
    return (
        f"{text}\n\n{format_table(sign_rows)}\n\nThousandths of a nat an answer, behind random nuggets, before the "
        "scorer learns. Gradient: of a nugget's score; below 0 the scorer learns to keep such tokens. Swap: the "
        "change of the loss when a nugget gives way to such a token; below 0 such tokens are worth more."
    )


STUDY = FactsStudy()
