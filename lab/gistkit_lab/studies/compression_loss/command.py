"""The command of the study `compression-loss`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gistkit.evaluate.report import format_table
from gistkit.train.data import load_corpus
from gistkit_lab.studies.compression_loss import report
from gistkit_lab.studies.compression_loss.runs import Run, train
from gistkit_lab.studies.compression_loss.study import SETTINGS, Recipe
from gistkit_lab.studies.options import add_names, add_runs, add_text, jobs
from gistkit_lab.studies.pages import machine_caption, runs, seeds
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = (
    "Losses in nats a byte, in brackets one that was not pretrained on. Tuned: after fine-tuning on that loss alone. "
    "Time: of pretraining, as a ratio to that without CL."
)
GAPS = (
    "Nats a byte after fine-tuning on AE, on held-out text; at equal time: where the sooner of two ends. Times are "
    "compared in seeds whose runs are all of one machine and commit."
)


class CompressionLoss(Study):
    """The same model pretrained under each of `SETTINGS`, then fine-tuned alike."""

    name = "compression-loss"
    run_type = Run
    recipe_type = Recipe
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_names(parser, "--settings", list(SETTINGS), list(SETTINGS), "; without-ae-cl: the continuation loss alone")
        add_text(parser)
        add_runs(parser, Recipe.steps)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe, corpus = Recipe(steps=options.steps), load_corpus(options.text)
        about = (
            f"Pretraining for {recipe.steps} steps under {len(options.settings)} settings; then {recipe.tuning_steps} "
            f"of fine-tuning on the AE loss, and as many on questions; text {corpus.name}, {corpus.digest}"
        )
        return StudyPlan(recipe, jobs(options.settings, options.seeds), about, corpus)

    def arm_name(self, run: Run) -> str:
        return run.setting

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        tables = (report.table_rows(runs), report.gap_rows(runs))
        return "\n\n".join(format_table(rows) for rows in tables if len(rows) > 1)

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return (
            f"Held-out text:\n{format_table(report.table_rows(runs, 'held_out'))}\n\n"
            "Text that no choice was made on, and gaps seed by seed on held-out text:\n"
            f"{self.table(runs, plan.recipe)}\n\n{UNITS}\n{report.NAMES}\n{report.CLAIM}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe: Recipe = group[0].recipe
            how = (
                f"{recipe.steps} steps of pretraining and {recipe.tuning_steps} of each fine-tuning, {seeds(group)}: "
                "mean (lowest-highest)"
            )
            timed = _seeds_of_one_machine(group)
            table = format_table(report.table_rows(runs(group), timed=timed))
            tables.append(f"{table}\n\nText on which nothing was chosen, {how}. {UNITS} {machine_caption(group)}.")
            if len(gaps := report.gap_rows(runs(group), timed)) > 1:
                tables.append(f"{format_table(gaps)}\n\n{GAPS} {report.NAMES}")
        return "\n\n".join(tables)

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


def _seeds_of_one_machine(group: Sequence[SavedRun]) -> set[int]:
    """Seeds whose runs have one machine and commit: seconds of others, faster or slower, would be compared."""
    machines = {saved.run.seed: saved.machine for saved in group}
    return machines.keys() - {saved.run.seed for saved in group if saved.machine != machines[saved.run.seed]}


STUDY = CompressionLoss()
