"""Question answering for fine-tuning: rows of different lengths, padded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gistkit.common.text_ids import text_ids
from gistkit.evaluate.data import Example
from gistkit.train.batches import CONTEXT, Epochs, Row, check_size
from gistkit.train.data import HELD_OUT


class QuestionAnswering(Epochs):
    """Questions for the loss "qa". Every epoch goes once through the training questions, in its own order.

    Held out is the last tenth of the contexts of each set, with all their questions, or else questions of their own.
    Their token ids are in memory, those of each context once.

    Args:
        examples: such as from `gistkit.evaluate.iter_questions`: context, question and answers as text or token ids;
            the first answer is trained on. At least two different contexts. Several sets of examples by name are one
            mixture.
        tokenizer: as in `load_corpus`; contexts get its special tokens, as in an evaluation.
        size: rows B of a batch.
        seed: at least 0.
        max_context: contexts are cut to this many tokens; None: never.
        end_token: id after every answer; None: the tokenizer's, if it has one.
        validation: examples or sets of them that are held out; all others are trained on. None: the last tenth.
        progress: whether to show a progress bar.
    """

    def __init__(
        self,
        examples: Iterable[Example] | Mapping[str, Iterable[Example]],
        tokenizer: Any,
        size: int,
        seed: int = 0,
        *,
        max_context: int | None = None,
        end_token: int | None = None,
        validation: Iterable[Example] | Mapping[str, Iterable[Example]] | None = None,
        progress: bool = False,
    ) -> None:
        check_size(size, seed)
        if end_token is None:
            end_token = getattr(tokenizer, "eos_token_id", None)
        self._options = (tokenizer, max_context, () if end_token is None else (end_token,), progress)
        # Different contexts, questions as (the number of their context, question, answer), and a hash of all.
        self._contexts: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}
        self._questions: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._digest = hashlib.sha256()
        # Where each set begins.
        starts: list[int] = []
        held_out: set[int] = set()
        for name, several in _sets("examples", examples):
            count = self._add(name, several, starts)
            if validation is None and count < 2:
                raise ValueError(f"{name}: expected at least 2 different contexts, one to hold out, got {count}")
            held_out.update(range(len(self._contexts))[-max(1, int(count * HELD_OUT)) :])
        trained = len(self._questions)
        for name, several in () if validation is None else _sets("validation", validation):
            self._add(name, several, starts)
        if not self._questions:
            raise ValueError("examples: expected at least one question, got none")
        is_last = np.array([number in held_out for number, *_ in self._questions])
        if validation is not None:
            is_last = np.arange(len(self._questions)) >= trained
        in_turn = _in_turn(np.flatnonzero(is_last), starts)
        self._digest.update(in_turn.tobytes())
        super().__init__(size, seed, np.flatnonzero(~is_last), in_turn)

    def _add(self, name: str, examples: Iterable[Example], starts: list[int]) -> int:
        """Tokenises the examples of a set; the number of contexts that no set before had."""
        starts.append(len(self._questions))
        tokenizer, max_context, end, progress = self._options
        before = len(self._contexts)
        bar = tqdm(examples, desc=f"tokenising {name}", unit="question", disable=not progress)
        for index, example in enumerate(bar):
            row = _tokenised(f"{name}[{index}]", example, tokenizer, max_context, end)
            context, question, answer = (np.array(ids, np.int32) for ids in row)
            key = hashlib.blake2b(context.tobytes(), digest_size=16).digest()
            number = self._numbers.setdefault(key, len(self._contexts))
            if number == len(self._contexts):
                self._contexts.append(context)
            self._digest.update(json.dumps(row).encode())
            self._questions.append((number, question, answer))
        if len(self._questions) == starts[-1]:
            raise ValueError(f"{name}: expected at least 1 question, got none")
        return len(self._contexts) - before

    def row(self, number: int) -> Row:
        """{"input_ids": [p], "question_ids": [q], "answer_ids": [a]}; of several sets held-out ones come in turn."""
        context, question, answer = self._questions[number]
        return {CONTEXT: self._contexts[context], "question_ids": question, "answer_ids": answer}

    @property
    def identity(self) -> dict[str, Any]:
        """The questions, which are held out, and the seed."""
        return {"questions": self._digest.hexdigest()[:12], "size": self.size, "seed": self.seed}


def _sets(
    name: str, examples: Iterable[Example] | Mapping[str, Iterable[Example]]
) -> Iterable[tuple[str, Iterable[Example]]]:
    return examples.items() if isinstance(examples, Mapping) else [(name, examples)]


def _in_turn(indices: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Ascending indices in the order in which sets that begin at `starts` take turns."""
    sets = np.searchsorted(starts, indices, side="right")
    ranks = np.arange(len(indices)) - np.searchsorted(sets, sets)
    return indices[np.lexsort((sets, ranks))]


def _tokenised(
    name: str, example: Example, tokenizer: Any, max_context: int | None, end: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """The token ids of a context, of the text between it and the answer, and of the answer."""
    if example.question is None or not example.answers:
        raise ValueError(f"{name}: expected a question with an answer, got none")
    context = _ids(tokenizer, example.context, special=True)[:max_context]
    answer = _ids(tokenizer, example.answers[0])
    if not context or not answer:
        raise ValueError(f"{name}: expected a context and an answer of at least 1 token, got none")
    return context, _ids(tokenizer, example.question), answer + end


def _ids(tokenizer: Any, tokens: Any, *, special: bool = False) -> tuple[int, ...]:
    if isinstance(tokens, str):
        return tuple(text_ids(tokens, tokenizer, special_tokens=special))
    return tuple(torch.as_tensor(tokens).tolist())
