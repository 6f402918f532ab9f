"""The command of the study `compression-loss`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit.studies import reconstruction
from gistkit.studies.compression_loss.study import SETTINGS, Recipe, build_compressor, table_rows
from gistkit.studies.epl import report
from gistkit.studies.epl.command import Epl
from gistkit.studies.options import add_runs, add_text, jobs
from gistkit.studies.pages import drop_column, machine_caption, runs, seeds
from gistkit.studies.registry import SavedRun
from gistkit.studies.study import StudyPlan
from gistkit.train.data import load_corpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTION = "Held-out losses in nats a byte; in brackets a loss that was not trained on."


class CompressionLoss(Epl):
    """The same autoencoder under each of `SETTINGS`."""

    name = "compression-loss"
    recipe_type = Recipe

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_text(parser)
        add_runs(parser, Recipe.steps)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe, corpus = Recipe(steps=options.steps), load_corpus(options.text)
        return StudyPlan(recipe, jobs(list(SETTINGS), options.seeds), source=corpus)

    def build(self, recipe: Any, arm: str, seed: int) -> Any:
        return build_compressor(recipe, arm, seed)

    def table(self, runs: Sequence[reconstruction.Run], recipe: Any) -> str:
        return format_table(table_rows(runs))

    def report(self, runs: Sequence[reconstruction.Run], plan: StudyPlan) -> str:
        return f"{self.table(runs, plan.recipe)}\n\n{CAPTION}"

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        (group,) = groups
        table = format_table(drop_column(table_rows(runs(group)), "seconds"))
        how = f"{group[0].recipe.steps} steps, {seeds(group)}"
        note = "in brackets a loss that was not trained on"
        return f"{table}\n\nHeld-out, nats a byte, {how}; {note}. {machine_caption(group)}."

    def figures(self, runs: Sequence[reconstruction.Run], recipe: Any) -> Mapping[str, Figure]:
        return {"loss": report.figures(runs, recipe, legend="setting")["loss"]}


STUDY = CompressionLoss()
