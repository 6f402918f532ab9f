"""The command of the study `retrieval`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit.nn import TEXT_ENCODINGS
from gistkit.options.arguments import path
from gistkit.train.data import load_corpus
from gistkit_lab.studies.extrapolation.command import add_encodings
from gistkit_lab.studies.extrapolation.student import arms
from gistkit_lab.studies.length.command import add_corpus, corpus_of
from gistkit_lab.studies.length.study import Recipe as ModelRecipe
from gistkit_lab.studies.options import add_text, jobs
from gistkit_lab.studies.pages import drop_column, machine_caption, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.retrieval import documents, report, squad
from gistkit_lab.studies.retrieval.study import PRESETS, Recipe, Run, train
from gistkit_lab.studies.study import Job, Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyRecipe = Recipe | documents.Recipe | squad.Recipe
# What trains the runs of a variant.
TRAIN: dict[str, Any] = {"": train, "documents": documents.train, "squad": squad.train}


class RetrievalStudy(Study):
    """Facts looked up in longer contexts than in training, among filler or in documents."""

    name = "retrieval"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS | documents.PRESETS | squad.PRESETS
    shared = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        sizes = (
            "quick: seconds a run; short: trained on 64 tokens and tested on 512, a minute or two a run on a CPU; "
            "documents: the language models of length, from OUT/length or trained there in some minutes each, are "
            "fine-tuned on questions about 128 bytes of real text and tested on 1024, some minutes a run; "
            "seqpe-squad: the language models of length's preset seqpe-wikitext, from OUT/length or trained there, are "
            "fine-tuned on questions about several paragraphs of 1024 tokens and tested on 8192, on a GPU"
        )
        add_encodings(parser, self.presets, sizes, TEXT_ENCODINGS)
        add_text(parser, "text file or folder, for the language models")
        add_corpus(parser, "seqpe-squad")
        for option, purpose in (("--questions", "to fine-tune on"), ("--test-questions", "to test on")):
            parser.add_argument(
                option, type=path, help=f"SQuAD, MRQA or another file of questions {purpose}, for seqpe-squad"
            )

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
        if isinstance(recipe, squad.Recipe):
            return self._plan_squad(options, recipe)
        if options.text is not None:
            raise ValueError(
                f"--text: expected none but with --preset documents or seqpe-squad, got {str(options.text)!r}"
            )
        about = (
            f"{recipe.facts} facts, a key and its value each: trained on {recipe.length} tokens, tested at up to "
            f"{recipe.lengths[-1]}; by chance one answer in {recipe.values} is right; "
            f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}"
        )
        return StudyPlan(recipe, arm_jobs, about, preset=options.preset)

    def _plan_squad(self, options: argparse.Namespace, recipe: squad.Recipe) -> StudyPlan:
        for option in ("questions", "test_questions"):
            if getattr(options, option) is None:
                raise ValueError(f"--{option.replace('_', '-')}: expected a file of questions, got none")
        corpus = corpus_of(options, of_paper=options.preset in squad.NOTES)
        questions = squad.Questions.load(corpus, options.questions, options.test_questions)
        about = (
            f"{len(questions.train)} questions of {questions.names[0]}, fine-tuned on contexts of {recipe.length} "
            f"{corpus.unit}, and {len(questions.test)} of {questions.names[1]}, tested at up to {recipe.lengths[-1]}; "
            f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch} after "
            f"{recipe.model.steps} of the language model; text {corpus.name}, {corpus.digest}"
        )
        about = "\n".join(filter(None, [about, squad.NOTES.get(options.preset)]))
        return StudyPlan(recipe, jobs(arms(options.encodings), options.seeds), about, questions, options.preset)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> Run:
        chosen = TRAIN[self.variant(plan.recipe)]
        source = () if plan.source is None else (plan.source,)
        return chosen(plan.recipe, job.arm, job.seed, *source, out, device=device, resume=resume, bar=bar)

    def variant(self, recipe: AnyRecipe) -> str:
        if isinstance(recipe, squad.Recipe):
            return "squad"
        return "documents" if isinstance(recipe, documents.Recipe) else ""

    def recipe_of(self, values: dict[str, Any]) -> AnyRecipe:
        if "model" in values:
            kind: Any = squad.Recipe if "new_tokens" in values else documents.Recipe
            return kind(**values | {"model": ModelRecipe(**values["model"])})
        return Recipe(**values)

    def arm_name(self, run: Run) -> str:
        return run.arm

    def small(self, recipe: AnyRecipe) -> bool:
        return recipe.dim <= 128

    def table(self, runs: Sequence[Run], recipe: AnyRecipe) -> str:
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
            variant, how = self.variant(recipe), f"{recipe.steps} steps of {recipe.batch} x {recipe.length} "
            if variant:
                how += "tokens" if variant == "squad" else "bytes"
                how += f" at most, after {recipe.model.steps} of the language model ({group[0].source.split()[-1]})"
            else:
                how += "tokens"
            if variant != "squad":
                how = f"by chance {1 / recipe.values:.3f}; {how}"
            for kind in ("exact", "perplexity") if variant else ("exact",):
                rows = drop_column(report.table_rows(runs(group), kind), "training")
                rows[0][0] = f"{variant}, {kind}" if variant else rows[0][0]
                tables.append(format_table(rows))
            tables[-1] += f"\n\nShare of right answers; {how}. {machine_caption(group)}."
        return "\n\n".join([*tables, format_table(report.paper_rows())])

    def figures(self, runs: Sequence[Run], recipe: AnyRecipe) -> Mapping[str, Figure]:
        return report.figures(runs)


STUDY = RetrievalStudy()
