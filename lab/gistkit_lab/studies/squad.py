"""Questions of SQuAD or MRQA about several documents, which language models are fine-tuned to answer.

A context is the paragraph that a question is about among others, as many as fit; in tests there are more of them
(SeqPE: Transformer with Sequential Position Encoding, Section 4.2, Appendix B.3 and Figure 4, with RULER's documents).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.common.checks import IGNORE, check_int
from gistkit.common.files import read_tensors, write_tensors
from gistkit.common.text_ids import text_ids
from gistkit.formats import Asked, read_questions
from gistkit.nn import Learned
from gistkit.train.data import Corpus
from gistkit_lab.studies import length as language_models
from gistkit_lab.studies.draws import SPLITS
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.positions import Run, Student, finished

# SeqPE, Figure 4; ANSWER stands behind the last colon and a space.
_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
PROMPT = (
    f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{documents}}\n\n{_INSTRUCTION}\n\n"
    "Question: {question} Answer:"
)
# RULER's form of a document.
DOCUMENT = "Document {number}:\n{text}"
# Ends an answer of bytes; a tokenizer has its own.
END_BYTE = 0
# Every so many paragraphs of the training questions are held out, with all their questions.
HELD_OUT = 10
_BEST = "the best weights of a run"
# Questions that are drawn in vain before none is taken to fit.
TRIES = 1000


@dataclass(frozen=True)
class Recipe(language_models.TunedRecipe):
    """Everything that determines a run except its arm, its seed, the text and the questions.

    Args:
        model, longest: as of `TunedRecipe`.
        length: tokens of a training sequence, at most: prompt and answer without the end behind it.
        new_tokens: of a greedy answer.
        eval_rows: held-out questions at every evaluation; the model with their lowest loss is the one that is tested.
        test_rows: questions of each split and length at the end.
    """

    length: int = 1024
    new_tokens: int = 16
    eval_rows: int = 200
    test_rows: int = 500

    def __post_init__(self) -> None:
        for name in ("new_tokens", "eval_rows", "test_rows"):
            check_int(name, getattr(self, name))
        # Checks length and longest.
        _ = self.schedule


PRESETS = {
    "seqpe-squad": Recipe(
        steps=10_000, batch=128, learning_rate=5e-5, warmup=100, weight_decay=0.0, clip=5.0, eval_every=500,
        model=language_models.PRESETS["seqpe-wikitext"],
    )
}  # fmt: skip
NOTES = {
    "seqpe-squad": (
        "Follows SeqPE, Section 4.2 and Appendix B.3: the models of length's preset seqpe-wikitext, fine-tuned for "
        "10,000 steps with 100 of warm-up on contexts of 1024 tokens in the prompt of Figure 4, with the loss of "
        "answers alone; the model of the lowest held-out perplexity answers at up to 8192 tokens, 16 tokens by greedy "
        "search. All else is that of B.1, 128 rows a step among it; the released code takes 64. The paper does not "
        "say, and its code has: an answer ends with the end-of-text token, which losses and perplexities count. Ours: "
        "a tenth of the training paragraphs is held out, and a learned table of 512 positions is stretched to 1024."
    )
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Questions:
    """A text for the language model, whose tokenizer is that of the questions, and these for its fine-tuning."""

    corpus: Corpus
    train: Sequence[Asked]
    test: Sequence[Asked]
    names: tuple[str, str]

    @classmethod
    def load(cls, corpus: Corpus, train: Path, test: Path) -> Questions:
        """The questions of two files, of any format of `gistkit.formats`; summaries are left out."""
        questions = [[asked for asked in read_questions(path) if asked.question] for path in (train, test)]
        for path, found in zip((train, test), questions, strict=True):
            if not found:
                raise ValueError(f"{path}: expected at least one question, got none")
        return cls(corpus, questions[0], questions[1], (Path(train).name, Path(test).name))

    @property
    def name(self) -> str:
        """Of the text and the files."""
        return f"{self.names[0]} and {self.names[1]} after {self.corpus.name}"

    @property
    def digest(self) -> str:
        """As that of a `Corpus`, of the text and of both sets of questions."""
        content = [self.corpus.digest, *[list(asked[1:]) for asked in (*self.train, *self.test)]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Row:
    """A question in its context: ids of the prompt, of the answer with its end, and all right answers."""

    prompt: list[int]
    answer: list[int]
    right: tuple[str, ...]


class Prompts:
    """Questions with contexts of any length, by seed and step."""

    def __init__(self, questions: Questions, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed, self.tokenizer = recipe, seed, questions.corpus.tokenizer
        end = END_BYTE if self.tokenizer is None else getattr(self.tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError("tokenizer: expected one with an end-of-text token, got one without")
        self.end: int = end
        contexts = list(dict.fromkeys(asked.context for asked in questions.train))
        held_out = set(contexts[HELD_OUT - 1 :: HELD_OUT])
        self._questions = {
            "train": [asked for asked in questions.train if asked.context not in held_out],
            "held_out": [asked for asked in questions.train if asked.context in held_out],
            "test": list(questions.test),
        }
        for name, split in self._questions.items():
            if not split:
                raise ValueError(
                    f"questions: expected some about {HELD_OUT} paragraphs at least, so that a tenth is held out, got "
                    f"{len(contexts)} paragraphs and no question in the split {name!r}"
                )
        self._contexts = {
            name: list(dict.fromkeys(asked.context for asked in split)) for name, split in self._questions.items()
        }
        self._sizes: dict[str, int] = {}

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [batch, n] both, of step 0, 1, ..., n varying; labels are -100 but for answers."""
        random = np.random.default_rng([SPLITS["train"], self.seed, step])
        split = self._questions["train"]
        rows: list[Row] = []
        while len(rows) < self.recipe.batch:
            rows.append(self._fitting(random, "train", self.recipe.length, split))
        return self.padded(rows)

    def split(self, name: str, length: int, rows: int) -> list[Row]:
        """Questions of the split "held_out" or "test" with contexts of a length, at most `rows` of them.

        They are the first ones in a shuffled order that fit the shortest length, so that each length asks the same.
        """
        random = np.random.default_rng([SPLITS[name]])
        order = random.permutation(len(self._questions[name])).tolist()
        found: list[Row] = []
        for index in order:
            asked = self._questions[name][index]
            if self._row(asked, [asked.context], self.recipe.lengths[0]) is None:
                continue
            row = self._with_documents(np.random.default_rng([SPLITS[name], length, index]), name, length, asked)
            if row is not None:
                found.append(row)
            if len(found) == rows:
                break
        if not found:
            raise ValueError(
                f"length: expected room for the prompt, a paragraph and an answer of the split {name!r}, got {length}"
            )
        return found

    def padded(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """(input_ids, labels) of rows, padded behind; the loss is that of the answers and their ends."""
        longest = max(len(row.prompt) + len(row.answer) for row in rows) - 1
        ids, labels = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), IGNORE)
        for index, row in enumerate(rows):
            whole = torch.tensor(row.prompt + row.answer)
            start = len(row.prompt) - 1
            ids[index, : len(whole) - 1] = whole[:-1]
            labels[index, start : len(whole) - 1] = whole[start + 1 :]
        return ids, labels

    def text(self, ids: Sequence[int]) -> str:
        """The text of generated ids, up to the first end."""
        kept = list(ids)[: list(ids).index(self.end)] if self.end in ids else list(ids)
        if self.tokenizer is None:
            return bytes(kept).decode("utf-8", "replace")
        return str(self.tokenizer.decode(kept))

    def _fitting(self, random: np.random.Generator, name: str, length: int, split: Sequence[Asked]) -> Row:
        for _ in range(TRIES):
            row = self._with_documents(random, name, length, split[int(random.integers(len(split)))])
            if row is not None:
                return row
        raise ValueError(
            f"length: expected room for the prompt, a paragraph and an answer in training, got {length} tokens"
        )

    def _with_documents(self, random: np.random.Generator, name: str, length: int, asked: Asked) -> Row | None:
        """The question among as many other paragraphs of its split as fit, in any order; None: not even alone."""
        best = self._row(asked, [asked.context], length)
        if best is None:
            return None
        contexts, others, free = self._contexts[name], [], length - len(best.prompt) - len(best.answer)
        # About as many as fit; then one fewer until they do.
        for index in random.permutation(len(contexts))[: 1 + length // 8].tolist():
            if contexts[index] == asked.context:
                continue
            free -= self._size(contexts[index])
            if free < 0:
                break
            others.append(contexts[index])
        while others:
            documents = [asked.context, *others]
            row = self._row(asked, [documents[place] for place in random.permutation(len(documents))], length)
            if row is not None:
                return row
            others.pop()
        return best

    def _row(self, asked: Asked, documents: Sequence[str], length: int) -> Row | None:
        """The prompt with these documents; None: longer than `length`."""
        listed = "\n\n".join(DOCUMENT.format(number=i, text=text.strip()) for i, text in enumerate(documents, 1))
        prompt = PROMPT.format(documents=listed, question=str(asked.question).strip())
        ids = text_ids(prompt, self.tokenizer, special_tokens=False)
        answer = [*text_ids(f" {asked.answers[0].strip()}", self.tokenizer, special_tokens=False), self.end]
        # The end is not read.
        return Row(ids, answer, asked.answers) if len(ids) + len(answer) - 1 <= length else None

    def _size(self, context: str) -> int:
        """Tokens of a paragraph as a document, about."""
        if context not in self._sizes:
            text = "\n\n" + DOCUMENT.format(number=10, text=context.strip())
            self._sizes[context] = len(text_ids(text, self.tokenizer, special_tokens=False))
        return self._sizes[context]


@torch.no_grad()
def answer_loss(student: Student, data: Prompts, rows: Sequence[Row], length: int) -> float:
    """Mean loss in nats a token of the answers and their ends, with contexts of `length` tokens."""
    loss = tokens = 0.0
    at_once = max(1, 4096 // length)
    with student.model.position.frozen():
        for start in range(0, len(rows), at_once):
            ids, labels = data.padded(rows[start : start + at_once])
            wanted = labels.to(student.device)
            logits = student.logits(ids, where=wanted != IGNORE)
            answers = wanted[wanted != IGNORE]
            loss += float(F.cross_entropy(logits, answers, reduction="sum"))
            tokens += len(answers)
    return loss / tokens


@torch.no_grad()
def answered(student: Student, data: Prompts, rows: Sequence[Row]) -> dict[str, float]:
    """{"exact", "contains"}: the shares of greedy answers that are a right one, and that hold one, in lower case."""
    exact = contains = 0.0
    student.model.eval()
    for row in rows:
        ids = torch.tensor(row.prompt, device=student.device)[None]
        with student.precision():
            whole = student.model.generate(ids, data.recipe.new_tokens)
        found = data.text(whole[0, ids.shape[1] :].tolist()).lower().strip()
        right = {answer.lower().strip() for answer in row.right}
        exact += found in right
        contains += any(answer in found for answer in right)
    return {"exact": exact / len(rows), "contains": contains / len(rows)}


def measure(student: Student, data: Prompts, split: str, length: int, rows: int) -> dict[str, float]:
    """{"loss", "exact", "contains"} of a split at a length."""
    asked = data.split(split, length, rows)
    position = student.model.position
    if isinstance(position, Learned):
        # Keys in a cache need one stretch for all tokens to come.
        position.extent = max(position.length, length + data.recipe.new_tokens)
    try:
        return {"loss": answer_loss(student, data, asked, length), **answered(student, data, asked)}
    finally:
        if isinstance(position, Learned):
            position.extent = None


def train(session: Session) -> Run:
    """Fine-tunes and measures one arm and seed of a language model in `out`/length, see `pretrained`.

    What is measured is the model of the lowest held-out loss, `out`/ARM-SEED/best.safetensors.
    """
    recipe, questions, seed = session.recipe, session.source, session.seed
    data, corpus = Prompts(questions, recipe, seed), questions.corpus
    base = language_models.pretrained(session, recipe.model, corpus)
    student = Student(recipe.schedule, session.arm, language_models.vocabulary(corpus), seed, session.device)
    start_from(student, base)
    asked = data.split("held_out", recipe.length, recipe.eval_rows)
    best = session.state / "best.safetensors"

    def figures() -> tuple[float, float]:
        loss = answer_loss(student, data, asked, recipe.length)
        keep_best(student, best, loss)
        return loss, answered(student, data, asked)["exact"]

    # The measurements at the end do not determine a run; the language model does.
    progress = student.train(session, data, figures, questions=questions.digest, model=recipe.model.steps)
    load_best(student, best)
    figure = lambda split, length: measure(student, data, split, length, recipe.test_rows)  # noqa: E731
    return finished(session, student, progress, recipe.lengths, figure)


def start_from(student: Student, base: Student) -> None:
    """Gives a student the weights of another of its arm; a shorter table of positions is stretched."""
    weights = dict(base.model.state_dict())
    if isinstance(student.model.position, Learned):
        table = weights["position.table"]
        stretched = F.interpolate(table.mT[None], size=student.model.position.length, mode="linear", align_corners=True)
        weights["position.table"] = stretched[0].mT
    student.model.load_state_dict(weights)


def keep_best(student: Student, path: Path, loss: float) -> None:
    """Writes the weights, unless those that are there have a loss as low."""
    if not path.exists() or loss < float(read_tensors(path, _BEST)[0]["loss"]):
        write_tensors(path, dict(student.model.named_parameters()), {"loss": repr(loss)})


def load_best(student: Student, path: Path) -> None:
    """Gives a student the weights that `keep_best` wrote."""
    _, weights = read_tensors(path, _BEST)
    with torch.no_grad():
        for name, parameter in student.model.named_parameters():
            parameter.copy_(weights[name])
