"""The command of the study `epl`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit.layouts.positions import SCHEMES
from gistkit.train.data import load_corpus
from gistkit_lab.studies import reconstruction
from gistkit_lab.studies.epl import report
from gistkit_lab.studies.epl.study import Recipe, build_compressor
from gistkit_lab.studies.options import add_names, add_runs, add_text, jobs
from gistkit_lab.studies.pages import machine_caption, runs, seeds
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Job, Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDIED = ("dpl", "upl", "epl")


class Epl(Study):
    """Reconstruction under several position layouts."""

    name = "epl"
    run_type = reconstruction.Run
    recipe_type: Any = Recipe

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_names(parser, "--layouts", SCHEMES, STUDIED)
        add_text(parser)
        add_runs(parser, Recipe.steps)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe, corpus = Recipe(steps=options.steps), load_corpus(options.text)
        about = (
            f"Reconstructing {recipe.chunk} bytes from {recipe.chunk // recipe.ratio} memory tokens; text "
            f"{corpus.name} ({corpus.train.numel()} + {corpus.held_out.numel()} held-out bytes, {corpus.digest})"
        )
        return StudyPlan(recipe, jobs(options.layouts, options.seeds), about, corpus)

    def build(self, recipe: Any, arm: str, seed: int) -> Any:
        """The untrained compressor of an arm."""
        return build_compressor(recipe, arm, seed)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> reconstruction.Run:
        corpus: Any = plan.source
        return reconstruction.train(
            plan.recipe, self.build, job.arm, job.seed, corpus, out, device=device, resume=resume, bar=bar
        )

    def arm_name(self, run: reconstruction.Run) -> str:
        return run.layout

    def table(self, runs: Sequence[reconstruction.Run], recipe: Any) -> str:
        return format_table(report.table_rows(runs))

    def report(self, runs: Sequence[reconstruction.Run], plan: StudyPlan) -> str:
        return "\n".join(
            [
                self.table(runs, plan.recipe),
                "\nOne held-out passage, reconstructed greedily:",
                report.format_passages(runs),
                f"\n{report.format_tracking(runs, plan.recipe)}",
                f"\n{report.LIMITS}",
            ]
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        (group,) = groups
        recipe = group[0].recipe
        return (
            f"{self.table(runs(group), recipe)}\n\nHeld-out, {recipe.steps} steps, {seeds(group)}: mean "
            f"(lowest-highest). {machine_caption(group)}."
        )

    def figures(self, runs: Sequence[reconstruction.Run], recipe: Any) -> Mapping[str, Figure]:
        return report.figures(runs, recipe)


STUDY = Epl()
