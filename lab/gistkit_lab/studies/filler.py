"""Facts among filler, a token each that says which value a key has; then values are asked for, a key each.

A longer context has as many facts, farther apart in more filler. A small model from scratch learns this in a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.common.checks import IGNORE, check_int
from gistkit_lab.studies.draws import SPLITS, seed_of
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.positions import Run, Sizes, Student, finished


@dataclass(frozen=True)
class Recipe(Sizes):
    """Everything that determines a run except its arm and its seed.

    Args:
        keys: at most one fact of a context is about each.
        values: each as often the value of a key as any other.
        filler: different tokens that stand for nothing.
        facts: of a context.
        questions: at the end of a sequence.
        eval_rows: held-out sequences at every evaluation.
        test_rows: sequences of each split and length at the end.
    """

    keys: int = 16
    values: int = 16
    filler: int = 8
    facts: int = 12
    questions: int = 6
    eval_rows: int = 64
    test_rows: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("values", "filler", "questions"):
            check_int(name, getattr(self, name))
        if not self.questions <= self.facts <= self.keys:
            raise ValueError(
                f"facts: expected at least {self.questions} questions and at most {self.keys} keys, got {self.facts}"
            )
        if self.context(self.length) < self.facts:
            raise ValueError(
                f"length: expected at least {self.facts + 2 * self.questions - 1} tokens, those of the facts and "
                f"questions, got {self.length}"
            )

    def context(self, length: int) -> int:
        """Tokens before the first question of a sequence with `length` tokens to read."""
        return length + 1 - 2 * self.questions

    @property
    def vocabulary(self) -> int:
        """Tokens: values, keys, filler and facts, in this order."""
        return self.values + self.keys + self.filler + self.keys * self.values


# The model's first weights are larger than GPT-2's: at a width of 64 attention would hardly begin to choose with those.
_SMALL = Recipe(
    steps=800, batch=32, learning_rate=3e-3, eval_every=200, length=64, longest=8, dim=64, heads=2, weight_std=0.1,
    encoder_heads=2, max_position=600, digits=3, pivots=16, candidates=16, windows=8, window_positions=16,
)  # fmt: skip
PRESETS = {
    # Some ten seconds a run.
    "quick": replace(_SMALL, steps=300, warmup=25, eval_every=300, test_rows=64),
    # A minute or two a run.
    "short": _SMALL,
}


class Facts:
    """Sequences of facts among filler and questions about them, by seed and step."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed = recipe, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [batch, length] both, of step 0, 1, ...; labels are -100 but for answers."""
        return self._rows([SPLITS["train"], self.seed, step], self.recipe.batch, self.recipe.length)

    def split(self, name: str, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """The same of the split "held_out" or "test", [rows, length], at another length."""
        return self._rows([SPLITS[name], length], rows, length)

    def _rows(self, numbers: Sequence[int], rows: int, length: int) -> tuple[Tensor, Tensor]:
        recipe, generator = self.recipe, torch.Generator().manual_seed(seed_of(*numbers))

        def choices(count: int, among: int) -> Tensor:
            """[rows, count] different ones of 0, 1, ..., among - 1."""
            return torch.rand(rows, among, generator=generator).argsort(1)[:, :count]

        first_filler = recipe.values + recipe.keys
        context = first_filler + torch.randint(0, recipe.filler, (rows, recipe.context(length)), generator=generator)
        keys = choices(recipe.facts, recipe.keys)
        values = torch.randint(0, recipe.values, keys.shape, generator=generator)
        fact_columns = choices(recipe.facts, context.shape[1])
        context.scatter_(1, fact_columns, first_filler + recipe.filler + keys * recipe.values + values)
        fact_indices = choices(recipe.questions, recipe.facts)
        questions, answers = recipe.values + keys.gather(1, fact_indices), values.gather(1, fact_indices)
        ids = torch.cat([context, torch.stack([questions, answers], -1).flatten(1)], 1)
        labels = torch.stack([torch.full_like(answers, IGNORE), answers], -1).flatten(1)
        labels = torch.cat([torch.full_like(context, IGNORE), labels], 1)
        return ids[:, :-1], labels[:, 1:]


@torch.no_grad()
def measure(student: Student, data: Any, split: str, length: int, rows: int) -> dict[str, float]:
    """{"loss", "exact"} of the answers in `rows` sequences of a split of `Facts` or `Documents` at a length."""
    inputs, labels = data.split(split, length, rows)
    last = 2 * data.recipe.questions - 1
    loss = exact = 0.0
    at_once = max(1, 4096 // length)
    with student.model.position.frozen():
        for ids, batch_labels in zip(inputs.split(at_once), labels[:, -last::2].split(at_once), strict=True):
            logits = student.logits(ids, last=last)[:, ::2].flatten(0, 1)
            answers = batch_labels.flatten().to(student.device)
            loss += float(cross_entropy(logits, answers, reduction="sum"))
            exact += float((logits.argmax(-1) == answers).sum())
    count = rows * data.recipe.questions
    return {"loss": loss / count, "exact": exact / count}


def train(session: Session) -> Run:
    """Trains and measures one arm and seed."""
    recipe, data = session.recipe, Facts(session.recipe, session.seed)
    student = Student(recipe, session.arm, recipe.vocabulary, session.seed, session.device)
    return train_and_measure(session, student, data)


def train_and_measure(session: Session, student: Student, data: Any, **identity: Any) -> Run:
    """Trains a student on sequences, and measures it at each length. `identity`: what determines the sequences."""
    recipe = session.recipe

    def figures() -> tuple[float, float]:
        held_out = measure(student, data, "held_out", recipe.length, recipe.eval_rows)
        return held_out["loss"], held_out["exact"]

    progress = student.train(session, data, figures, **identity)
    figure = lambda split, length: measure(student, data, split, length, recipe.test_rows)  # noqa: E731
    return finished(session, student, progress, recipe.lengths, figure)
