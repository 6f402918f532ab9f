"""The command of the study `nuggets`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.metrics import need
from gistkit.evaluate.report import format_table
from gistkit.options.arguments import positive, several, whole
from gistkit.train.data import load_corpus
from gistkit_lab.studies.models import add_preset, tokenizer
from gistkit_lab.studies.nuggets import report
from gistkit_lab.studies.nuggets.runs import Run, train
from gistkit_lab.studies.nuggets.study import LM_ARMS, PRESETS, SELECTIONS, TASKS, Arm, Recipe, arms
from gistkit_lab.studies.options import add_names, add_runs, add_text, jobs
from gistkit_lab.studies.pages import machine_caption, model_line, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NuggetsStudy(Study):
    """Learned nuggets beside other ways of keeping as many states."""

    name = "nuggets"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_preset(parser, PRESETS, ", at the paper's sizes")
        add_names(parser, "--tasks", TASKS, TASKS, "; ae: reconstruct a context; lm: read on")
        add_names(parser, "--methods", LM_ARMS, LM_ARMS)
        add_names(parser, "--ratios", ("2", "4", "8", "10", "16", "20"), ("4", "8"), ", of ae")
        parser.add_argument(
            "--random-steps", type=whole(), default=0, metavar="N",
            help="steps of ae with random nuggets before the scorer learns (default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--lower-ratios", type=several(positive), default=[], metavar="R,R,..",
            help="ratios of ae on the way to the arm's, as with gistkit train --ratios (default: none)",
        )  # fmt: skip
        add_text(parser)
        add_runs(parser)

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        need("sacrebleu")
        stages = {"random_steps": options.random_steps, "lower_ratios": tuple(options.lower_ratios)}
        recipe = replace(self.recipe_for(options), **stages)
        corpus = load_corpus(options.text, tokenizer=tokenizer(recipe))
        study_arms = arms(recipe, options.tasks, options.methods, [int(ratio) for ratio in options.ratios])
        if not study_arms:
            raise ValueError(f"--methods: expected some of {', '.join(SELECTIONS)} for the task ae, got others")
        for arm in study_arms:
            # Stages that do not fit the steps are a mistake before the first run.
            recipe.stages(arm)
        about = (
            f"Nuggets of contexts of {recipe.context} and texts of {recipe.length} {corpus.unit}, "
            f"{len(study_arms)} arms of {recipe.steps} steps; text {corpus.name}, {corpus.digest}"
        )
        return StudyPlan(recipe, jobs(study_arms, options.seeds), about, corpus, options.preset)

    def recipe_of(self, values: dict[str, Any]) -> Recipe:
        return Recipe(**values | {"lower_ratios": tuple(values.get("lower_ratios", ()))})

    def arm_name(self, run: Run) -> str:
        return Arm(run.task, run.method, run.ratio).name

    def small(self, recipe: Recipe) -> bool:
        return recipe.model == "small"

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        tables = (report.language_rows(runs), report.reconstruction_rows(runs))
        return "\n\n".join(format_table(rows) for rows in tables if len(rows) > 1)

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        parts = []
        for title, rows in (
            ("A context, reconstructed from its nuggets", report.reconstruction_rows(runs)),
            ("A text, continued from as many states", report.language_rows(runs)),
            ("What the scorer that learned to reconstruct selects", report.type_rows(runs, "ae")),
            ("What the scorer that learned to read on selects", report.type_rows(runs, "lm")),
        ):
            if len(rows) > 1:
                parts.append(f"{title}:\n{format_table(rows)}")
        return "\n\n".join([*parts, report.PAPER])

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe = group[0].recipe
            caption = f"{model_line(recipe)}, {recipe.steps} steps of {{}}. {machine_caption(group)}."
            texts = f"{recipe.lm_batch} texts of {recipe.length} tokens, of which the last {recipe.asked} are asked for"
            contexts = f"{recipe.batch} contexts of {recipe.context} tokens"
            for rows, how in (
                (report.language_rows(runs(group)), texts), (report.reconstruction_rows(runs(group)), contexts)
            ):  # fmt: skip
                if len(rows) > 1:
                    tables.append(f"{format_table(rows)}\n\n{caption.format(how)}")
        return "\n\n".join(tables)

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


STUDY = NuggetsStudy()
