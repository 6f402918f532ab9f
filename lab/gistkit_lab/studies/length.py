"""Study `length`: language models that are trained at one length and tested at longer ones, by position encoding.

All arms have the same model, steps, batches and held-out text; perplexity is that of chunks without overlap (SeqPE:
Transformer with Sequential Position Encoding, Section 4.1 and Tables I and IV; there the model is GPT-2 on
WikiText-103).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.common.files import write_picture
from gistkit.train import checkpoints
from gistkit.train.data import Corpus
from gistkit_lab.studies.draws import generator_of, measured
from gistkit_lab.studies.fitting import Progress, Session, StudyRecipe
from gistkit_lab.studies.pages import machine_caption
from gistkit_lab.studies.positions import (
    Panel,
    PositionStudy,
    Run,
    Sizes,
    Student,
    draw_lengths,
    finished,
    load_part,
    number,
)
from gistkit_lab.studies.rows import Rows
from gistkit_lab.studies.study import Pictures, SavedRun, StudyPlan


@dataclass(frozen=True)
class Recipe(Sizes):
    """Everything that determines a run except its arm, its seed and the text.

    Args:
        eval_tokens: held-out tokens at every evaluation.
        test_tokens: of each split at the end, at most; every length reads the same ones.
    """

    eval_tokens: int = 4096
    test_tokens: int = 1 << 18


PRESETS = {
    # Seconds a run.
    "quick": Recipe(
        steps=250, batch=8, warmup=25, eval_every=250, length=64, longest=16, dim=64, heads=2, encoder_heads=2,
        max_position=1200, pivots=16, candidates=16, windows=8, window_positions=16,
    ),
    # A minute or three a run.
    "short": Recipe(),
    # Section 4.1, for a GPU.
    "seqpe-wikitext": Recipe(
        steps=100_000, batch=128, learning_rate=5e-5, warmup=4000, weight_decay=0.0, clip=5.0, beta_2=0.999,
        eval_every=2000, length=512, longest=32, dim=768, layers=12, heads=12, dropout=0.1, attention_dropout=0.1,
        style="gpt2", decay="linear", final=0.0, bfloat16=True, max_position=20_000, base=10, digits=5,
        encoder_layers=2, encoder_heads=12, encoder_dropout=0.1, pivots=32, candidates=32, windows=32,
        window_positions=32, contrastive_weight=0.1, ood_weight=0.1, shift_rate=0.1, eval_tokens=1 << 16,
        test_tokens=1 << 20,
    ),
}  # fmt: skip

# By preset, what it follows and what its paper leaves open.
NOTES = {
    "seqpe-wikitext": (
        "Follows SeqPE, Section 4.1 and Appendices A and B.1: GPT-2 on WikiText-103, 100,000 steps of 128 rows (32 on "
        "each of 4 devices) of 512 tokens, learning rate 5e-5, linear after 4000 steps of warm-up, dropout 0.1, "
        "bfloat16; SeqPE with 5 decimal digits and 2 layers without weight decay, both losses weighing 0.1, 32 pivots "
        "with 32 candidates, 32 windows of 32 positions, L_max 20,000, 10% of sequences shifted. The paper does not "
        "say, and its released code has: random first weights, AdamW with betas 0.9 and 0.999 and without weight "
        "decay, gradients clipped to 5, dropout 0.1 of attention's weights in GPT-2 and none of these in the encoder. "
        "Neither says, or they differ: a quarter of a global pivot's candidates are lexical confusions; pivots are "
        "global or local with equal chance (the code: 40% global; 16 pivots and windows)."
    )
}  # fmt: skip


@dataclass(frozen=True)
class TunedRecipe(StudyRecipe):
    """The fine-tuning of such a language model.

    Args:
        model: of the language model, before.
        longest: tests are as long as the longest sequences in training, twice as long, ..., up to this many times.
    """

    model: Recipe = field(default_factory=Recipe)
    longest: int = 8

    @property
    def length(self) -> int:
        """Of the longest sequences in training."""
        return self.model.length

    @property
    def schedule(self) -> Recipe:
        """The recipe of `model`, with the lengths and the steps of the fine-tuning."""
        tuning = {name: getattr(self, name) for name in StudyRecipe.__dataclass_fields__}
        return replace(self.model, length=self.length, longest=self.longest, **tuning)

    @property
    def dim(self) -> int:
        return self.model.dim

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences in tests, at most."""
        return self.schedule.lengths


class LengthTexts:
    """Training rows by seed and step, and the two splits of the held-out text (`Corpus.splits`)."""

    def __init__(self, corpus: Corpus, recipe: Recipe, seed: int) -> None:
        self.corpus, self.recipe, self.seed = corpus, recipe, seed
        # The last label follows the longest length.
        splits = measured(corpus, recipe.lengths[-1] + 1)
        self.splits = {name: split.held_out for name, split in splits.items()}

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [batch, length] both, of step 0, 1, ..."""
        rows = self.corpus.batch(self.recipe.batch, self.recipe.length + 1, generator_of(self.seed, step))
        return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def losses(student: Student, text: Tensor, lengths: Sequence[int], tokens: int) -> dict[int, float]:
    """Mean loss in nats a token of chunks without overlap of token ids [n], by length.

    All lengths, divisors of the longest, read the same `tokens`, at most, but one chunk of the longest at least.
    """
    longest = max(lengths)
    count = max(1, min(len(text) - 1, tokens) // longest) * longest
    inputs, labels = text[:count].long(), text[1 : count + 1].long().to(student.device)
    loss_by_length = {}
    for length in lengths:
        total = 0.0
        rows = max(1, 4096 // length)
        pairs = zip(inputs.view(-1, length).split(rows), labels.view(-1, length).split(rows), strict=True)
        with student.model.position.frozen():
            for chunk, chunk_labels in pairs:
                logits = student.logits(chunk)
                total += float(cross_entropy(logits.flatten(0, 1), chunk_labels.flatten(), reduction="sum"))
        loss_by_length[length] = total / count
    return loss_by_length


def train(session: Session) -> Run:
    """Trains and measures one arm and seed."""
    recipe, (student, progress) = session.recipe, fit(session)
    found = {
        split: losses(student, text, recipe.lengths, recipe.test_tokens)
        for split, text in session.source.splits().items()
    }
    return finished(session, student, progress, recipe.lengths, lambda split, length: found[split][length])


def pretrained(session: Session, recipe: Recipe, corpus: Corpus) -> Student:
    """The language model of a session's arm and seed in `out`/length, this study's; trained if it is not there."""
    own = replace(session, recipe=recipe, source=corpus, out=session.out / "length")
    with own.shared(session.arm) as shared:
        return fit(shared)[0]


def fit(session: Session) -> tuple[Student, Progress]:
    """The trained language model of an arm and seed."""
    recipe, corpus = session.recipe, session.source
    texts = LengthTexts(corpus, recipe, session.seed)
    student = Student(recipe, session.arm, vocabulary(corpus), session.seed, session.device)
    ends = (recipe.lengths[0], recipe.lengths[-1])

    def figures() -> tuple[float, float]:
        held_out = losses(student, texts.splits["held_out"], ends, recipe.eval_tokens)
        return held_out[ends[0]], held_out[ends[1]]

    return student, student.train(session, texts, figures, text=corpus.digest)


def vocabulary(corpus: Corpus) -> int:
    """Tokens of a text, or bytes."""
    return 256 if corpus.tokenizer is None else len(corpus.tokenizer)


# SeqPE, Tables I and IV: perplexity on WikiText-103 at 1x, 2x, .. of 512 tokens.
PAPER = {
    "nope": (20.40, 34.98, 116.11, 289.73, 536.29, 881.56),
    "sinusoidal": (23.37, 77.86, 628.68, 2.3e3, 5.0e3, 9.4e3),
    "learned": (20.30, 21.36, 37.70, 86.90, 152.53, 230.63),
    "rope-1e4": (19.44, 35.25, 113.17, 252.15, 477.89, 745.52),
    "rope-1e6": (19.46, 30.18, 92.01, 201.57, 332.04, 539.20),
    "rope-1e8": (19.42, 42.92, 144.71, 341.40, 541.17, 786.08),
    "alibi": (20.06, 19.06, 18.65, 18.72, 19.36, 21.39),
    "seqpe-bias": (19.65, 18.74, 18.51, 18.58, 18.86, 19.37),
    "seqpe-bias-no-delta": (19.57, 33.81, 104.07, 205.33),
    "seqpe-bias-no-ood": (19.62, 18.78, 18.56, 18.62),
    "seqpe-bias-no-delta-no-ood": (19.57, 23.57, 60.51, 125.32),
}


class LengthStudy(PositionStudy):
    """Language models at longer texts than they were trained on."""

    name = "length"
    recipe_type = Recipe
    presets = PRESETS
    paper = "seqpe-wikitext"
    notes = NOTES
    published, published_of, published_at = PAPER, "WikiText-103", [512 << power for power in range(6)]
    sizes = (
        "quick: seconds a run; short: trained on 128 bytes and tested on 4096, minutes a run on a CPU; seqpe-wikitext: "
        "GPT-2 on WikiText-103, trained on 512 tokens and tested on 16384, on a GPU"
    )
    text = "text file or folder"
    train = staticmethod(train)
    measured = (
        "Perplexity of chunks without overlap, held-out text",
        "Perplexity of chunks without overlap, text that no choice was made on",
    )

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        super().add_own(parser)
        self.add_corpus(parser)

    def load(self, options: argparse.Namespace, recipe: Recipe) -> Corpus:
        return self.corpus(options)

    def about(self, recipe: Recipe, arms: Sequence[str], source: Corpus) -> str:
        return (
            f"Language models of {recipe.length} {source.unit}, tested at up to {recipe.lengths[-1]}: {len(arms)} "
            f"position encodings, {recipe.steps} steps of {recipe.batch}; text {source.name}, {source.digest}"
        )

    def rows(self, runs: Sequence[Run], recipe: Any, split: str = "test") -> Rows:
        return self.by_length(runs, split, math.exp, number)

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        recipe = group[0].recipe
        how = f"{recipe.steps} steps of {recipe.batch} x {recipe.length} bytes"
        return [f"Text on which nothing was chosen, {how}. {machine_caption(group)}."]

    def figures(self, runs: Sequence[Run], recipe: Any) -> Pictures:
        """Perplexity against the length, ours and the paper's."""
        paper = Panel("paper: GPT-2 on WikiText-103", self.paper_lines(runs))
        panels = [Panel("perplexity", self.lines(runs, math.exp)), paper]
        return {"length": draw_lengths(panels, "Language models at longer texts than they were trained on")}

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        encodings = ("seqpe-bias-no-delta", "seqpe-bias")
        states = {arm: path for arm in encodings if checkpoints.find(path := out / f"{arm}-0")}
        if len(states) < len(encodings) or {job.arm for job in plan.jobs}.isdisjoint(encodings):
            return []
        return [self.draw_embeddings(out / "similarity.png", plan.recipe, states)]

    def draw_embeddings(self, path: Path, recipe: Recipe, states: Mapping[str, Path]) -> Path:
        """How alike the embeddings of positions are before training and after it, as a PNG file (SeqPE, Figure 2).

        `states` are by arm, the folder of its run.
        """
        from gistkit_lab.viz.similarity import draw_similarity

        embeddings: dict[str, Any] = {}
        positions = min(2048, recipe.base**recipe.digits)
        for arm, state in states.items():
            encoder = Student(recipe, arm, 256, seed=0).encoder
            if encoder is None:
                raise ValueError(f"states: expected arms with an encoder, got {arm!r}")
            with torch.no_grad():
                embeddings.setdefault("before training", encoder.eval().table(positions))
                load_part(encoder, state, "position.encoder.")
                embeddings[self.titles[arm].removeprefix("SeqPE ")] = encoder.table(positions)
        write_picture(path, draw_similarity(embeddings, trained=recipe.length), dpi=100)
        return path


STUDY = LengthStudy()
