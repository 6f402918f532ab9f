"""The command of the study `length`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit.train import checkpoints
from gistkit.train.data import Corpus, load_corpus
from gistkit_lab.studies.extrapolation.command import add_encodings
from gistkit_lab.studies.extrapolation.student import ARMS, arms
from gistkit_lab.studies.length import report
from gistkit_lab.studies.length.study import NOTES, PAPER_DATASET, PAPER_TOKENIZER, PRESETS, Recipe, Run, train
from gistkit_lab.studies.options import add_text, jobs
from gistkit_lab.studies.pages import drop_column, machine_caption, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LengthStudy(Study):
    """Language models at longer texts than they were trained on."""

    name = "length"
    run_type = Run
    recipe_type = Recipe
    presets = PRESETS
    shared = True
    train_run = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        sizes = (
            "quick: seconds a run; short: trained on 128 bytes and tested on 4096, minutes a run on a CPU; "
            "seqpe-wikitext: GPT-2 on WikiText-103, trained on 512 tokens and tested on 16384, on a GPU"
        )
        add_encodings(parser, PRESETS, sizes, ARMS)
        add_text(parser, "text file or folder")
        add_corpus(parser, "seqpe-wikitext")

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        recipe = self.recipe_for(options)
        corpus = corpus_of(options, of_paper=options.preset in NOTES)
        about = (
            f"Language models of {recipe.length} {corpus.unit}, tested at up to {recipe.lengths[-1]}: "
            f"{len(options.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}; text {corpus.name}, "
            f"{corpus.digest}"
        )
        about = "\n".join(filter(None, [about, NOTES.get(options.preset)]))
        return StudyPlan(recipe, jobs(arms(options.encodings), options.seeds), about, corpus, options.preset)

    def arm_name(self, run: Run) -> str:
        return run.arm

    def small(self, recipe: Recipe) -> bool:
        return recipe.dim <= 128

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        return f"{format_table(report.table_rows(runs))}\n\n{format_table(report.paper_rows())}"

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        title = "Perplexity of chunks without overlap,"
        return (
            f"{title} held-out text:\n{format_table(report.table_rows(runs, 'held_out'))}\n\n"
            f"{title} text that no choice was made on:\n{self.table(runs, plan.recipe)}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        tables = []
        for group in groups:
            recipe = group[0].recipe
            how = f"{recipe.steps} steps of {recipe.batch} x {recipe.length} bytes"
            table = format_table(drop_column(report.table_rows(runs(group)), "training"))
            tables.append(f"{table}\n\nText on which nothing was chosen, {how}. {machine_caption(group)}.")
        return "\n\n".join([*tables, format_table(report.paper_rows())])

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        encodings = ("seqpe-bias-no-delta", "seqpe-bias")
        states = {arm: path for arm in encodings if checkpoints.find(path := out / f"{arm}-0")}
        if len(states) < len(encodings) or {job.arm.name for job in plan.jobs}.isdisjoint(encodings):
            return []
        return [report.draw_embeddings(out / "similarity.png", plan.recipe, states)]


def add_corpus(parser: argparse.ArgumentParser, preset: str) -> None:
    """--dataset and --tokenizer, with other defaults in the preset that follows the paper."""
    parser.add_argument(
        "--dataset", help=f"Hugging Face dataset with a column text (default: of {preset}, WikiText-103)"
    )
    parser.add_argument("--tokenizer", help=f"folder or hub name (default: bytes; of {preset}, GPT-2's)")


def corpus_of(options: argparse.Namespace, *, of_paper: bool) -> Corpus:
    """The text that --text, --dataset and --tokenizer ask for; the paper's where they ask for none."""
    dataset, tokenizer = options.dataset, options.tokenizer
    if of_paper and options.text is None and dataset is None:
        dataset = PAPER_DATASET
    if of_paper and tokenizer is None:
        tokenizer = PAPER_TOKENIZER
    return load_corpus(options.text, dataset=dataset, tokenizer=_tokenizer(tokenizer), progress=dataset is not None)


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


STUDY = LengthStudy()
