"""Questions about real documents, which the language models of the study `length` are fine-tuned to answer.

A document is text with facts in front of its words, a byte each that says which digit a letter has; at its end letters
are asked for. In tests a longer document has as many facts, farther apart in more text (SeqPE: Transformer with
Sequential Position Encoding, Section 4.2 and Table II; there the questions are SQuAD's). Facts of two bytes, a letter
before its digit, are not learned in as many steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gistkit.common.checks import IGNORE
from gistkit.train.data import Corpus
from gistkit_lab.studies import length as language_models
from gistkit_lab.studies.draws import SPLITS, check_bytes, measured
from gistkit_lab.studies.filler import train_and_measure
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.positions import Run, Student

LETTERS, DIGITS = (np.frombuffer(text, np.uint8) for text in (b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"0123456789"))
# Bytes of a fact with the space behind it, and of a question with its answer.
FACT, QUESTION = 2, 2
# Bytes from here on are facts; those of the text are question marks.
ASCII = 128


@dataclass(frozen=True)
class Recipe(language_models.TunedRecipe):
    """Everything that determines a run except its arm, its seed and the text.

    Args:
        model, longest: as of `TunedRecipe`.
        shortest: training sequences have this many bytes or more, up to those of `model`; short ones are learned first.
        letters: that facts are about.
        facts: of a document in tests, each about another letter; in training from 1 to so many, by chance.
        questions: at the end of a sequence, each about another fact; fewer where there are fewer facts.
        eval_rows: held-out sequences at every evaluation.
        test_rows: sequences of each split and length at the end.
    """

    shortest: int = 24
    letters: int = 8
    facts: int = 6
    questions: int = 4
    eval_rows: int = 64
    test_rows: int = 256

    def __post_init__(self) -> None:
        if not self.letters <= (256 - ASCII) // len(DIGITS):
            raise ValueError(f"letters: expected at most {(256 - ASCII) // len(DIGITS)}, got {self.letters}")
        if not 1 <= self.questions <= self.facts <= self.letters:
            raise ValueError(
                f"facts: expected at least {self.questions} questions and at most {self.letters} letters, got "
                f"{self.facts}"
            )
        if not 1 <= self.most_facts(self.shortest) <= self.most_facts(self.length) == self.facts:
            raise ValueError(
                f"shortest: expected room for a fact, and for {self.facts} in the {self.length} bytes of model, got "
                f"{self.shortest}"
            )

    @property
    def values(self) -> int:
        return len(DIGITS)

    def most_facts(self, length: int) -> int:
        """As many facts, up to `facts`, as leave two bytes of text to each; 0: none do."""
        return max((facts for facts in range(1, self.facts + 1) if self.text(length, facts) >= 2 * facts), default=0)

    def text(self, length: int, facts: int) -> int:
        """Bytes of text in a sequence with `length` bytes to read, which has so many facts."""
        # A line's end stands between the document and its questions; the last answer is not read.
        return length - FACT * facts - QUESTION * min(facts, self.questions)


class Documents:
    """Documents with facts, and questions about them, by seed and step, of a corpus of bytes."""

    def __init__(self, corpus: Corpus, recipe: Recipe, seed: int) -> None:
        check_bytes(corpus)
        self.recipe, self.seed = recipe, seed
        splits = measured(corpus, recipe.lengths[-1])
        self._texts = {"train": corpus.train, **{name: split.held_out for name, split in splits.items()}}

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [batch, n] both, of step 0, 1, ..., n varying; labels are -100 but for answers."""
        random = np.random.default_rng([SPLITS["train"], self.seed, step])
        recipe = self.recipe
        growth = int(min(1.0, 2 * step / recipe.steps) * (recipe.length - recipe.shortest))
        length = recipe.shortest + int(random.integers(0, growth + 1))
        facts = int(random.integers(1, recipe.most_facts(length) + 1))
        return self._rows(random, "train", recipe.batch, length, facts)

    def split(self, name: str, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """The same of the split "held_out" or "test", [rows, length], with all facts."""
        random = np.random.default_rng([SPLITS[name], length])
        return self._rows(random, name, rows, length, self.recipe.facts)

    def _rows(
        self, random: np.random.Generator, split: str, rows: int, length: int, facts: int
    ) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(np.stack([self._row(random, split, length, facts) for _ in range(rows)])).long()
        labels = torch.full_like(ids, IGNORE)
        answers = slice(1 - QUESTION * min(facts, self.recipe.questions), None, QUESTION)
        labels[:, answers] = ids[:, answers]
        return ids[:, :-1], labels[:, 1:]

    def _row(self, random: np.random.Generator, split: str, length: int, count: int) -> np.ndarray:
        """uint8 [length + 1]: text with facts, a line's end, and questions with their answers."""
        source, size = self._texts[split], self.recipe.text(length, count)
        start = int(random.integers(0, len(source) - size + 1))
        text = source[start : start + size].numpy()
        text = np.where(text < ASCII, text, ord("?"))
        letters = random.choice(self.recipe.letters, count, replace=False)
        digits = random.integers(0, len(DIGITS), count)
        # Where a text has few words, facts stand in front of any bytes.
        words = np.flatnonzero(text[:-1] == ord(" ")) + 1
        places = random.choice(words if len(words) >= count else size, count, replace=False)
        facts = np.stack([ASCII + len(DIGITS) * letters + digits, np.full_like(letters, ord(" "))], 1)
        document = np.insert(text, np.repeat(places, FACT), facts.flatten())
        asked = random.permutation(count)[: self.recipe.questions]
        questions = np.stack([LETTERS[letters[asked]], DIGITS[digits[asked]]], 1)
        return np.concatenate([document, [ord("\n")], questions.flatten()]).astype(np.uint8)


# Two minutes a run on a CPU, and two to four for the language model of a new arm and seed.
PRESETS = {"documents": Recipe(steps=600, batch=32, learning_rate=2e-3, warmup=25, eval_every=150)}


def train(session: Session) -> Run:
    """Fine-tunes and measures one arm and seed of a language model in `out`/length, see `pretrained`."""
    recipe: Recipe = session.recipe
    corpus, data = session.source, Documents(session.source, recipe, session.seed)
    base = language_models.pretrained(session, recipe.model, corpus)
    student = Student(recipe.schedule, session.arm, 256, session.seed, session.device)
    student.model.load_state_dict(base.model.state_dict())
    # The measurements at the end do not determine a run; the language model does.
    sequences = [recipe.shortest, recipe.letters, recipe.facts, recipe.questions]
    return train_and_measure(session, student, data, text=corpus.digest, sequences=sequences, model=recipe.model.steps)
