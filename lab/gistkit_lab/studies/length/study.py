"""Study `length`: language models that are trained at one length and tested at longer ones, by position encoding.

All arms have the same model, steps, batches and held-out text; perplexity is that of chunks without overlap (SeqPE:
Transformer with Sequential Position Encoding, Section 4.1 and Tables I and IV; there the model is GPT-2 on
WikiText-103).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.train.data import Corpus
from gistkit_lab.studies.extrapolation.student import Arm, Sizes, Student
from gistkit_lab.studies.fitting import Progress, exclusively


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

PAPER_DATASET = "Salesforce/wikitext:wikitext-103-raw-v1"
PAPER_TOKENIZER = "openai-community/gpt2"


@dataclass
class Run:
    """The results of one arm and seed; losses in nats a token.

    `curve` holds (step, loss at L, loss at the longest length) over some held-out text, `held_out` and `test` the loss
    of the trained model at each length, of the first and the second half of what is held out; the second is read once.
    """

    arm: str
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0


class LengthTexts:
    """Training rows by seed and step, and the two splits of the held-out text (`Corpus.splits`).

    Args:
        corpus: where they come from.
        recipe: its length and its batch are those of the rows.
        seed: of the rows.
    """

    def __init__(self, corpus: Corpus, recipe: Recipe, seed: int) -> None:
        longest = recipe.lengths[-1]
        self.corpus, self.recipe, self.seed = corpus, recipe, seed
        self.splits = corpus.splits()
        for name, part in self.splits.items():
            if len(part) <= longest:
                raise ValueError(
                    f"corpus: expected more than {longest} {corpus.unit}, the longest length, in the split {name!r}, "
                    f"got {len(part)}"
                )

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [batch, length] both, of step 0, 1, ..."""
        generator = torch.Generator().manual_seed(100_003 * (self.seed + 1) + step)
        rows = self.corpus.batch(self.recipe.batch, self.recipe.length + 1, generator)
        return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def losses(student: Student, text: Tensor, lengths: Sequence[int], tokens: int) -> dict[int, float]:
    """Mean loss in nats a token of chunks without overlap, by length; all lengths read the same tokens.

    Args:
        text: token ids [n], n above the longest length.
        lengths: each a divisor of the longest.
        tokens: at most so many are read, but one chunk of the longest length at least.
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


def train(
    recipe: Recipe,
    arm: Arm,
    seed: int,
    corpus: Corpus,
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    bar: Any,
) -> Run:
    """Trains and measures one arm and seed; `out` gets its state at every evaluation, from which it can resume."""
    student, progress = fit(recipe, arm, seed, corpus, out, device=device, resume=resume, bar=bar)
    run = Run(arm.name, seed, progress.curve, seconds=progress.seconds, parameters=student.parameters)
    for split, text in corpus.splits().items():
        loss_by_length = losses(student, text, recipe.lengths, recipe.test_tokens)
        setattr(run, split, {str(length): loss for length, loss in loss_by_length.items()})
    return run


def pretrained(recipe: Recipe, arm: Arm, seed: int, corpus: Corpus, out: Path, *, device: str, bar: Any) -> Student:
    """The language model of an arm and seed in `out`/length, the folder of this study; trained if it is not there."""
    folder = out / "length"
    with exclusively(folder / f"{arm.name}-{seed}.lock"):
        return fit(recipe, arm, seed, corpus, folder, device=device, resume=True, bar=bar)[0]


def fit(
    recipe: Recipe, arm: Arm, seed: int, corpus: Corpus, out: Path, *, device: str, resume: bool, bar: Any
) -> tuple[Student, Progress]:
    """The trained language model of an arm and seed; arguments as of `train`."""
    texts = LengthTexts(corpus, recipe, seed)
    vocabulary = 256 if corpus.tokenizer is None else len(corpus.tokenizer)
    student = Student(recipe, arm, vocabulary, seed, device)
    ends = (recipe.lengths[0], recipe.lengths[-1])

    def figures() -> tuple[float, float]:
        held_out = losses(student, texts.splits["held_out"], ends, recipe.eval_tokens)
        return held_out[ends[0]], held_out[ends[1]]

    state = out / f"{arm.name}-{seed}"
    return student, student.train(texts, figures, state, {"text": corpus.digest}, resume=resume, bar=bar)
