"""Study `retrieval`: facts are looked up in contexts longer than those of training.

The facts stand among filler (`filler`), in real text (`documents`), or are SQuAD's answers (`squad`). The paper
fine-tunes its language models to answer questions about documents (SeqPE: Transformer with Sequential Position
Encoding, Section 4.2 and Table II).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gistkit.evaluate.report import format_table
from gistkit.nn import TEXT_ENCODINGS
from gistkit.options.arguments import existing
from gistkit_lab.studies import documents, filler, length, squad
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.positions import Panel, PositionStudy, Run, draw_lengths, number
from gistkit_lab.studies.rows import Rows
from gistkit_lab.studies.study import Pictures, SavedRun, StudyPlan

# SeqPE, Table II: perplexity and exact match in percent on RULER's SQuAD at 1x, 2x, .. of 1024 tokens.
PAPER = {
    "nope": ((6.07, 29.2), (236.53, 3.6), (967.89, 0.6), (1.5e4, 0.0)),
    "sinusoidal": ((7.66, 26.2), (577.48, 1.8), (1.5e4, 0.0), (1.5e6, 0.0)),
    "learned": ((6.79, 25.0), (15.66, 11.8), (41.30, 6.2), (365.49, 0.2)),
    "rope-1e6": ((5.62, 28.0), (23.00, 9.0), (314.77, 3.0), (963.48, 0.8)),
    "alibi": ((5.49, 23.8), (8.07, 11.4), (9.52, 8.0), (121.14, 2.0)),
    "seqpe-bias": ((5.56, 26.8), (7.64, 15.0), (7.58, 11.4), (28.60, 2.6)),
}
# The variants, by what is read.
VARIANTS: Mapping[str, Any] = {"": filler, "documents": documents, "squad": squad}
# Options that a variant has no use for.
_OF_SQUAD = ("tokenizer", "questions", "test_questions")
UNUSED: Mapping[str, Sequence[str]] = {"": ("text", "dataset", *_OF_SQUAD), "documents": _OF_SQUAD}


class RetrievalStudy(PositionStudy):
    """Facts looked up in longer contexts than in training, among filler or in documents."""

    name = "retrieval"
    recipe_type = filler.Recipe
    presets = filler.PRESETS | documents.PRESETS | squad.PRESETS
    paper = "seqpe-squad"
    notes = squad.NOTES
    defaults = TEXT_ENCODINGS
    published, published_of, published_at = PAPER, "RULER SQuAD", [1024 << power for power in range(4)]
    text = "text file or folder, for the language models"
    sizes = (
        "quick: seconds a run; short: trained on 64 tokens and tested on 512, a minute or two a run on a CPU; "
        "documents: the language models of length, from OUT/length or trained there in some minutes each, are "
        "fine-tuned on questions about 128 bytes of real text and tested on 1024, some minutes a run; "
        "seqpe-squad: the language models of length's preset seqpe-wikitext, from OUT/length or trained there, are "
        "fine-tuned on questions about several paragraphs of 1024 tokens and tested on 8192, on a GPU"
    )

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        super().add_own(parser)
        self.add_corpus(parser)
        for option, purpose in (("--questions", "to fine-tune on"), ("--test-questions", "to test on")):
            parser.add_argument(
                option, type=existing, help=f"SQuAD, MRQA or another file of questions {purpose}, for seqpe-squad"
            )

    def load(self, options: argparse.Namespace, recipe: Any) -> Any:
        variant = self.variant(recipe)
        for option in UNUSED.get(variant, ()):
            if (value := getattr(options, option)) is not None:
                word = option.replace("_", "-")
                raise ValueError(f"--{word}: expected none with --preset {options.preset}, got {str(value)!r}")
        if variant == "documents":
            return self.corpus(options)
        if not variant:
            return None
        for option in ("questions", "test_questions"):
            if getattr(options, option) is None:
                raise ValueError(f"--{option.replace('_', '-')}: expected a file of questions, got none")
        return squad.Questions.load(self.corpus(options), options.questions, options.test_questions)

    def about(self, recipe: Any, arms: Sequence[str], source: Any) -> str:
        longest, steps = recipe.lengths[-1], f"{recipe.steps} steps of {recipe.batch}"
        variant, encodings = self.variant(recipe), f"{len(arms)} position encodings"
        if not variant:
            return (
                f"{recipe.facts} facts, a key and its value each: trained on {recipe.length} tokens, tested at up to "
                f"{longest}; by chance one answer in {recipe.values} is right; {encodings}, {steps}"
            )
        corpus = source.corpus if variant == "squad" else source
        after = f"{steps} after {recipe.model.steps} of the language model; text {corpus.name}, {corpus.digest}"
        if variant == "documents":
            return (
                f"Documents with {recipe.facts} facts, a byte each: fine-tuned on {recipe.length} bytes, tested at up "
                f"to {longest}; by chance one answer in {recipe.values} is right; {encodings}, {after}"
            )
        return (
            f"{len(source.train)} questions of {source.names[0]}, fine-tuned on contexts of {recipe.length} "
            f"{corpus.unit}, and {len(source.test)} of {source.names[1]}, tested at up to {longest}; {encodings}, "
            f"{after}"
        )

    def file(self, options: argparse.Namespace, recipe: Any) -> str:
        # A variant shares the results file of the preset that it belongs to.
        return "short" if self.variant(recipe) == "documents" else options.preset

    def train(self, session: Session) -> Run:
        run: Run = VARIANTS[self.variant(session.recipe)].train(session)
        return run

    def variant(self, recipe: Any) -> str:
        return next(name for name, module in VARIANTS.items() if isinstance(recipe, module.Recipe))

    def recipe_of(self, values: dict[str, Any]) -> Any:
        if "model" in values:
            kind: Any = squad.Recipe if "new_tokens" in values else documents.Recipe
            return kind(**values | {"model": length.Recipe(**values["model"])})
        return filler.Recipe(**values)

    def figure_rows(self, runs: Sequence[Run], figure: str) -> Rows:
        """One row an arm at each length: "perplexity" of the answers, or "exact", the share without error."""
        if figure == "exact":
            return self.by_length(runs, "test", lambda figures: figures["exact"], "{:.3f}")
        return self.by_length(runs, "test", lambda figures: math.exp(figures["loss"]), number)

    def paper_cell(self, figure: tuple[float, float]) -> str:
        """Perplexity / exact match in percent."""
        return f"{number(figure[0])} / {figure[1]}"

    def table(self, runs: Sequence[Run], recipe: Any) -> str:
        return self._tables(runs, recipe, {"exact": "exact", "perplexity": "perplexity"})

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        names = {"exact": "Right answers", "perplexity": "Perplexity of the answers"}
        headings = {figure: f"{name}, sequences that no choice was made on" for figure, name in names.items()}
        return self._tables(runs, plan.recipe, headings)

    def _tables(self, runs: Sequence[Run], recipe: Any, headings: Mapping[str, str]) -> str:
        parts = [f"{name}:\n{format_table(self.figure_rows(runs, figure))}" for figure, name in headings.items()]
        return "\n\n".join([*parts, *map(format_table, self.paper_rows(recipe))])

    def captioned(self, group: Sequence[SavedRun]) -> Sequence[tuple[Rows, str]]:
        recipe = group[0].recipe
        variant, how = self.variant(recipe), f"{recipe.steps} steps of {recipe.batch} x {recipe.length} "
        if variant:
            how += "tokens" if variant == "squad" else "bytes"
            how += f" at most, after {recipe.model.steps} of the language model ({group[0].source.split()[-1]})"
        else:
            how += "tokens"
        if variant != "squad":
            how = f"by chance {1 / recipe.values:.3f}; {how}"
        tables: list[tuple[Rows, str]] = []
        for figure in ("exact", "perplexity") if variant else ("exact",):
            rows = self.figure_rows(runs(group), figure)
            rows[0][0] = f"{variant}, {figure}" if variant else rows[0][0]
            tables.append((rows, ""))
        return [*tables[:-1], (tables[-1][0], f"Share of right answers; {how}. {machine_caption(group)}.")]

    def figures(self, runs: Sequence[Run], recipe: Any) -> Pictures:
        """Perplexity and exact answers against the length, and the paper's."""
        panels = [
            Panel("perplexity of the answers", self.lines(runs, lambda values: math.exp(values["loss"]))),
            Panel("right answers", self.lines(runs, lambda values: values["exact"]), logarithmic=False),
            Panel("paper: perplexity, RULER SQuAD", self.paper_lines(runs, lambda figures: figures[0])),
        ]
        return {"retrieval": draw_lengths(panels, "Looking up facts in longer contexts than in training")}


STUDY = RetrievalStudy()
