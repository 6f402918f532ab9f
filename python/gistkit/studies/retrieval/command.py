"""The command of the study `retrieval`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gistkit.evaluate.report import format_table
from gistkit.nn import TEXT_ENCODINGS
from gistkit.studies.extrapolation.command import add_encodings
from gistkit.studies.extrapolation.student import arms
from gistkit.studies.options import jobs
from gistkit.studies.pages import drop_column, machine_caption, runs
from gistkit.studies.registry import SavedRun
from gistkit.studies.retrieval import report
from gistkit.studies.retrieval.study import PRESETS, Recipe, Run, train
from gistkit.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RetrievalStudy(Study):
    """Facts looked up in longer contexts than in training."""

    name = "retrieval"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        sizes = (
            "quick: seconds a run; short: trained on 64 tokens and tested on 512, a minute or two a run on a CPU; "
            "paper: GPT-2's size, trained on 1024 tokens and tested on 8192, on a GPU"
        )
        add_encodings(parser, PRESETS, sizes, TEXT_ENCODINGS)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe = self.recipe_for(options)
        about = (
            f"{recipe.facts} facts, a key and its value each: trained on {recipe.length} tokens, tested at up to "
            f"{recipe.lengths[-1]}; by chance one answer in {recipe.values} is right; "
            f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}"
        )
        return StudyPlan(recipe, jobs(arms(options.encodings), options.seeds), about, preset=options.preset)

    def arm_name(self, run: Run) -> str:
        return run.arm

    def small(self, recipe: Recipe) -> bool:
        return recipe.dim <= 128

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        tables = [f"{name}:\n{format_table(report.table_rows(runs, name))}" for name in ("exact", "perplexity")]
        return "\n\n".join([*tables, format_table(report.paper_rows())])

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        parts = [
            f"{heading}, sequences that no choice was made on:\n{format_table(report.table_rows(runs, figure))}"
            for figure, heading in (("exact", "Right answers"), ("perplexity", "Perplexity of the answers"))
        ]
        return "\n\n".join([*parts, format_table(report.paper_rows())])

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe = group[0].recipe
            how = f"by chance {1 / recipe.values:.3f}; {recipe.steps} steps of {recipe.batch} x {recipe.length} tokens"
            table = format_table(drop_column(report.table_rows(runs(group), "exact"), "training"))
            tables.append(f"{table}\n\nShare of right answers; {how}. {machine_caption(group)}.")
        return "\n\n".join([*tables, format_table(report.paper_rows())])

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


STUDY = RetrievalStudy()
