"""The command of the study `retrieval`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit.nn import TEXT_ENCODINGS
from gistkit.studies.extrapolation.command import add_encodings
from gistkit.studies.extrapolation.student import arms
from gistkit.studies.length.study import Recipe as ModelRecipe
from gistkit.studies.options import add_text, jobs
from gistkit.studies.pages import drop_column, machine_caption, runs
from gistkit.studies.registry import SavedRun
from gistkit.studies.retrieval import documents, report
from gistkit.studies.retrieval.study import PRESETS, Recipe, Run, train
from gistkit.studies.study import Job, Study, StudyPlan
from gistkit.train.data import load_corpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RetrievalStudy(Study):
    """Facts looked up in longer contexts than in training, among filler or in documents."""

    name = "retrieval"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS | documents.PRESETS

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        sizes = (
            "quick: seconds a run; short: trained on 64 tokens and tested on 512, a minute or two a run on a CPU; "
            "documents: the language models of length, from OUT/length or trained there in some minutes each, are "
            "fine-tuned on questions about 128 bytes of real text and tested on 1024, some minutes a run; "
            "paper: GPT-2's size, trained on 1024 tokens and tested on 8192, on a GPU"
        )
        add_encodings(parser, self.presets, sizes, TEXT_ENCODINGS)
        add_text(parser, "text file or folder, for documents")

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe = self.recipe_for(options)
        arm_jobs = jobs(arms(options.encodings), options.seeds)
        if isinstance(recipe, documents.Recipe):
            corpus = load_corpus(options.text)
            about = (
                f"Documents with {recipe.facts} facts, a byte each: fine-tuned on {recipe.length} "
                f"bytes, tested at up to {recipe.lengths[-1]}; by chance one answer in {recipe.values} is right; "
                f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch} after "
                f"{recipe.model.steps} of the language model; text {corpus.name}, {corpus.digest}"
            )
            # A variant shares the results file of the preset that it belongs to.
            return StudyPlan(recipe, arm_jobs, about, corpus, "short")
        if options.text is not None:
            raise ValueError(f"--text: expected none but with --preset documents, got {str(options.text)!r}")
        about = (
            f"{recipe.facts} facts, a key and its value each: trained on {recipe.length} tokens, tested at up to "
            f"{recipe.lengths[-1]}; by chance one answer in {recipe.values} is right; "
            f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}"
        )
        return StudyPlan(recipe, arm_jobs, about, preset=options.preset)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> Run:
        chosen: Any = documents.train if self.variant(plan.recipe) else train
        source = () if plan.source is None else (plan.source,)
        return chosen(plan.recipe, job.arm, job.seed, *source, out, device=device, resume=resume, bar=bar)

    def variant(self, recipe: Recipe | documents.Recipe) -> str:
        return "documents" if isinstance(recipe, documents.Recipe) else ""

    def recipe_of(self, values: dict[str, Any]) -> Recipe | documents.Recipe:
        if "model" in values:
            return documents.Recipe(**values | {"model": ModelRecipe(**values["model"])})
        return Recipe(**values)

    def arm_name(self, run: Run) -> str:
        return run.arm

    def small(self, recipe: Recipe | documents.Recipe) -> bool:
        return recipe.dim <= 128

    def table(self, runs: Sequence[Run], recipe: Recipe | documents.Recipe) -> str:
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
            kinds = ["exact"]
            if self.variant(recipe):
                how = (
                    f"{how[:-6]}bytes at most, after {recipe.model.steps} of the language model "
                    f"({group[0].source.split()[-1]})"
                )
                kinds.append("perplexity")
            for kind in kinds:
                rows = drop_column(report.table_rows(runs(group), kind), "training")
                rows[0][0] = f"documents, {kind}" if self.variant(recipe) else rows[0][0]
                tables.append(format_table(rows))
            tables[-1] += f"\n\nShare of right answers; {how}. {machine_caption(group)}."
        return "\n\n".join([*tables, format_table(report.paper_rows())])

    def figures(self, runs: Sequence[Run], recipe: Recipe | documents.Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


STUDY = RetrievalStudy()
