"""The examples of an evaluation, as token ids or text: from a file of questions, or cut from plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import Tensor

from gistkit.common.text_ids import text_ids
from gistkit.compress.tokens import QUESTION
from gistkit.evaluate.prompts import SUMMARIZE, check_template, fill
from gistkit.formats import read_questions

TASKS = ("ae", "lm", "qa")

Tokens = Sequence[int] | Tensor | str


@dataclass(frozen=True)
class Example:
    """One context and its tasks, as token ids, or as text if there is a tokenizer: names of special tokens are text.

    Args:
        context: the tokens to compress; at least one.
        continuation: the tokens after the context, for the task "lm"; None, or at least one.
        question: everything between the context and the answer, for the task "qa"; None, or at least one token.
        answers: the right answers, of which the best match counts. Texts, or token ids.
    """

    context: Tokens
    continuation: Tokens | None = None
    question: Tokens | None = None
    answers: Sequence[Tokens] = ()


@dataclass(frozen=True)
class Prepared:
    """An example as token ids, with its answers as texts and the first of them; empty where the example has none."""

    context: list[int]
    continuation: list[int]
    question: list[int]
    answers: tuple[str, ...]
    answer: list[int]

    def has(self, task: str) -> bool:
        """Whether there is something to measure for `task`."""
        return bool({"ae": self.context, "lm": self.continuation, "qa": self.question}[task])


def words_of(ids: Sequence[int], tokenizer: Any | None) -> str:
    """Token ids as text; without a tokenizer each id is a word."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _ids(name: str, tokens: Tokens, tokenizer: Any | None, special: bool = False) -> list[int]:
    if isinstance(tokens, str):
        if tokenizer is None:
            raise ValueError(f"{name}: expected token ids where there is no tokenizer, got text")
        ids = text_ids(tokens, tokenizer, special_tokens=special)
    elif isinstance(tokens, Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(f"{name}: expected int64 [n], got {tokens.dtype} of shape {tuple(tokens.shape)}")
        ids = tokens.tolist()
    else:
        for token in tokens:
            if not isinstance(token, Integral):
                raise ValueError(f"{name}: expected whole numbers, got {token!r}")
        ids = [int(token) for token in tokens]
    if not ids:
        raise ValueError(f"{name}: expected at least one token, got none")
    return ids


def prepare(data: Sequence[Example], tokenizer: Any | None, tasks: Sequence[str]) -> list[Prepared]:
    """The examples as token ids, checked for the tasks.

    The text of a context gets the tokenizer's special tokens (such as a first token); other texts get none.

    Raises:
        ValueError: if there is no example, or none for a task, or an example is malformed.
    """
    if isinstance(tasks, str) or not tasks or not set(tasks) <= set(TASKS):
        raise ValueError(f"tasks: expected some of {', '.join(TASKS)}, got {tasks!r}")
    if not data:
        raise ValueError("data: expected at least one example, got none")
    rows = []
    for index, example in enumerate(data):
        name = f"data[{index}]"
        if not isinstance(example, Example):
            raise ValueError(f"{name}: expected an Example, got {type(example).__name__}")
        context = _ids(f"{name}.context", example.context, tokenizer, special=True)
        continuation, question = (
            [] if tokens is None else _ids(f"{name}.{key}", tokens, tokenizer)
            for key, tokens in (("continuation", example.continuation), ("question", example.question))
        )
        rows.append(Prepared(context, continuation, question, *_answers(name, example, tokenizer, "qa" in tasks)))
    for task in tasks:
        if not any(row.has(task) for row in rows):
            required = {"lm": "a continuation", "qa": "a question"}[task]
            raise ValueError(
                f"data: expected an example with {required} for the task {task!r}, got {len(rows)} without"
            )
    return rows


def _answers(name: str, example: Example, tokenizer: Any | None, required: bool) -> tuple[tuple[str, ...], list[int]]:
    if not required or example.question is None:
        return (), []
    if isinstance(example.answers, str):
        raise ValueError(f"{name}.answers: expected a sequence of answers, got one text")
    texts = [
        answer
        if isinstance(answer, str) and tokenizer is not None
        else words_of(_ids(f"{name}.answers", answer, tokenizer), tokenizer)
        for answer in example.answers
    ]
    if not texts:
        raise ValueError(f"{name}.answers: expected at least one answer to its question, got none")
    first: Any = example.answers[0]
    if isinstance(first, str) and tokenizer is not None:
        first = text_ids(first, tokenizer, special_tokens=False)
    return tuple(texts), [int(token) for token in first]


def iter_questions(
    path: str | Path | Iterable[Mapping[str, Any]],
    *,
    template: str = QUESTION,
    split: str | None = None,
) -> Iterator[Example]:
    """The examples of `load_questions`, one at a time: no more than one record is in memory."""
    check_template(template)
    any_question = False
    for asked in read_questions(path, split):
        any_question = True
        prompt = fill(template, asked.context, SUMMARIZE if asked.question is None else asked.question)
        if not prompt.question:
            raise ValueError(f"{asked.where}, 'question': expected a text, because the template has no other, got ''")
        yield Example(prompt.context, question=prompt.question, answers=asked.answers)
    if not any_question:
        name = path if isinstance(path, str | Path) else "rows"
        raise ValueError(f"{name}: expected at least one question, got none")


def load_questions(
    path: str | Path | Iterable[Mapping[str, Any]],
    *,
    template: str = QUESTION,
    split: str | None = None,
) -> list[Example]:
    """Questions of a data set as it is published, or of JSON lines {"context", "question", "answers"}.

    The formats are those of MRQA, SQuAD 1.1 and 2.0 (whose questions without an answer are left out), DROP, RACE,
    NarrativeQA, FairytaleQA, Alpaca, PwC and CNN/DailyMail, plain, gzip or zstd: `gistkit.formats.questions` and
    `gistkit_lab.evaluate.folders` list them. A line that holds several questions is an example for each.

    The answers of CNN/DailyMail are summaries: the question is "Please summarize the above document in one sentence."
    A question of JSON lines may be empty; `template` then says what is asked for.

    Args:
        path: the file, the folder of a data set, "hf:owner/name" of the Hugging Face hub, or rows such as a split of
            the package `datasets`; see `gistkit.formats.read_questions`.
        template: text with {question} in it, put between context and answer, and perhaps names of special tokens. If
            it has {context} too, the text before that precedes the context and is part of it.
        split: "train", "validation" or "test", of a folder or a name that has several; None: all of a folder, and
            "train" of a name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no question, or a record is not as expected; it names the file, the line and the key.
    """
    return list(iter_questions(path, template=template, split=split))
