"""Study `retrieval`: values are looked up by their keys, trained at one length and tested at longer ones.

A context is many pairs of a key and a value of random tokens; then values are asked for, a key each. The answers have
a perplexity, and are exact where greedy decoding gives all of their tokens. A model from scratch learns this in
minutes; the paper fine-tunes its language models to answer questions about documents (SeqPE: Transformer with
Sequential Position Encoding, Section 4.2 and Table II).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.studies.extrapolation import IGNORE, Arm, Sizes, Student
from gistkit.studies.fitting import each_run

# The token before the key of a question; values and keys come after it.
ASK = 0
SPLITS = {"train": 0, "held_out": 1, "test": 2}


@dataclass(frozen=True)
class Recipe(Sizes):
    """Everything that decides a run but its arm and its seed.

    Args:
        keys: tokens that are keys; none stands in a context twice.
        values: tokens that values are made of.
        answer: tokens of a value.
        questions: at the end of a sequence.
        eval_rows: held-out sequences at every evaluation.
        test_rows: sequences of each split and length at the end.
    """

    keys: int = 512
    values: int = 64
    answer: int = 2
    questions: int = 8
    eval_rows: int = 64
    test_rows: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("values", "answer", "questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.pairs(self.length) < self.questions:
            raise ValueError(
                f"length: expected room for {self.questions} pairs besides as many questions, got {self.length}"
            )
        if self.keys < self.pairs(self.lengths[-1]):
            raise ValueError(f"keys: expected at least {self.pairs(self.lengths[-1])}, got {self.keys}")

    def pairs(self, length: int) -> int:
        """Of a context, where it and its questions have at most `length` tokens."""
        return (length - self.questions * (2 + self.answer)) // (1 + self.answer)

    @property
    def vocabulary(self) -> int:
        """Tokens."""
        return 1 + self.values + self.keys


PRESETS = {
    # Seconds a run.
    "quick": Recipe(
        steps=300, batch=16, warmup=25, eval_every=300, length=64, longest=8, dim=64, heads=2, encoder_heads=2,
        max_position=600, digits=3, pivots=16, candidates=16, windows=8, window_positions=16, keys=200, questions=6,
    ),
    # A few minutes a run.
    "short": Recipe(steps=1500, batch=32, longest=8, max_position=1200),
    # As many tokens, layers and channels as the paper's fine-tuning has, for a GPU.
    "paper": Recipe(
        steps=10_000, batch=128, learning_rate=5e-5, warmup=500, weight_decay=0.0, clip=5.0, eval_every=1000,
        length=1024, longest=8, dim=768, layers=12, heads=12, dropout=0.1, style="gpt2", decay="linear", final=0.0,
        bfloat16=True, max_position=20_000, digits=5, encoder_heads=12, encoder_dropout=0.1, windows=32, keys=4096,
        values=1024, answer=4, questions=8,
    ),
}  # fmt: skip


@dataclass
class Run:
    """What one arm and seed gave; losses in nats a token of answers, `exact` the share of answers without a wrong one.

    `curve` holds (step, loss, exact) over held-out sequences of the training length. `held_out` and `test` hold
    {"loss", "exact"} of the trained model at each length; the second is read once, at the end.
    """

    arm: str
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0


class Pairs:
    """Sequences of pairs and questions, by seed and step.

    Args:
        recipe: sizes of the sequences.
        seed: of those to train on; the others are the same for all seeds.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed = recipe, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [batch, N] both, of step 0, 1, ...; labels are -100 but for answers."""
        return self._rows([SPLITS["train"], self.seed, step], self.recipe.batch, self.recipe.length)

    def split(self, name: str, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """The same of the split "held_out" or "test", [rows, N], at another length."""
        return self._rows([SPLITS[name], length], rows, length)

    def _rows(self, numbers: Sequence[int], rows: int, length: int) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        generator = torch.Generator().manual_seed(_seed(numbers))
        count = recipe.pairs(length)
        keys = torch.rand(rows, recipe.keys, generator=generator).argsort(1)[:, :count, None] + 1 + recipe.values
        values = 1 + torch.randint(0, recipe.values, (rows, count, recipe.answer), generator=generator)
        pairs = torch.cat([keys, values], -1)
        asked = torch.rand(rows, count, generator=generator).argsort(1)[:, : recipe.questions, None]
        questions = pairs.gather(1, asked.expand(-1, -1, pairs.shape[-1]))
        questions = torch.cat([torch.full_like(asked, ASK), questions], -1)
        ids = torch.cat([pairs.flatten(1), questions.flatten(1)], 1)
        answers = torch.where(torch.arange(2 + recipe.answer) < 2, IGNORE, questions)
        labels = torch.cat([torch.full_like(pairs.flatten(1), IGNORE), answers.flatten(1)], 1)
        return ids[:, :-1], labels[:, 1:]


def _seed(numbers: Sequence[int]) -> int:
    """One seed for each list of numbers."""
    return int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@torch.no_grad()
def measure(student: Student, data: Pairs, split: str, length: int, rows: int) -> dict[str, float]:
    """{"loss", "exact"} of the answers in `rows` sequences of a split at a length."""
    inputs, labels = data.split(split, length, rows)
    answer = data.recipe.answer
    loss = exact = 0.0
    at_once = max(1, 4096 // length)
    for ids, wanted in zip(inputs.split(at_once), labels.split(at_once), strict=True):
        asked = wanted != IGNORE
        last = ids.shape[1] - int(asked[0].nonzero()[0])
        logits = student.logits(ids, last=last)[asked[:, -last:].to(student.device)]
        answers = wanted[asked].to(student.device)
        loss += float(cross_entropy(logits, answers, reduction="sum"))
        exact += float((logits.argmax(-1) == answers).view(-1, answer).all(1).sum())
    count = rows * data.recipe.questions
    return {"loss": loss / (count * answer), "exact": exact / count}


def train(
    recipe: Recipe, arm: Arm, seed: int, out: Path, *, device: str = "cpu", resume: bool = False, bar: Any
) -> Run:
    """Trains and measures one arm and seed; `out` keeps its state at every evaluation, so it can be resumed."""
    data = Pairs(recipe, seed)
    student = Student(recipe, arm, recipe.vocabulary, seed, device)
    run = Run(arm.name, seed, parameters=student.parameters)

    def figures() -> tuple[float, float]:
        found = measure(student, data, "held_out", recipe.length, recipe.eval_rows)
        return found["loss"], found["exact"]

    progress = student.train(data, figures, out / f"{arm.name}-{seed}.safetensors", {}, resume=resume, bar=bar)
    run.curve, run.seconds = progress.curve, progress.seconds
    for split in ("held_out", "test"):
        found = {str(length): measure(student, data, split, length, recipe.test_rows) for length in recipe.lengths}
        setattr(run, split, found)
    return run


def run_study(
    recipe: Recipe,
    chosen: Sequence[Arm],
    seeds: Sequence[int],
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
) -> Iterator[Run]:
    """Yields one `Run` for each arm and seed, with a progress bar each."""
    return each_run(
        lambda arm, seed, bar: train(recipe, arm, seed, out, device=device, resume=resume, bar=bar), chosen, seeds, out
    )
