"""Question answering for fine-tuning: rows of different lengths, padded."""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gistkit.evaluate.data import Example
from gistkit.train import batches
from gistkit.train.batches import Batch, Batches, check_size
from gistkit.train.data import HELD_OUT
from gistkit.train.stored import IdStore
from gistkit.train.streams import token_ids


@dataclass(frozen=True)
class Question:
    """Token ids of a context, of the text between it and the answer, and of the answer."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


class QuestionAnswering(Batches):
    """Questions for the loss "qa". Every epoch goes once through the training questions, in its own order.

    Held out is the last tenth of the contexts of each set, with all their questions, or else questions of their own.

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
        folder: where the token ids go, into a file without a name, which is mapped; None: they stay in memory.
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
        folder: str | Path | None = None,
        progress: bool = False,
    ) -> None:
        check_size(size, seed)
        if end_token is None:
            end_token = getattr(tokenizer, "eos_token_id", None)
        self._options = (tokenizer, max_context, () if end_token is None else (end_token,), progress)
        self.size, self.seed = size, seed
        # The last epoch's.
        self._order: tuple[int, np.ndarray] | None = None
        with ExitStack() as stack:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            file = None if folder is None else stack.enter_context(tempfile.TemporaryFile(dir=folder))
            self._rows = rows = _Rows(IdStore(file))
            # Where each set begins.
            starts: list[int] = []
            held_out: list[int] = []
            for name, several in _sets("examples", examples):
                starts.append(len(rows))
                count = self._add(name, several)
                if validation is not None and len(rows) == starts[-1]:
                    raise ValueError(f"{name}: expected at least 1 question, got none")
                if validation is None and count < 2:
                    raise ValueError(f"{name}: expected at least 2 different contexts, one to hold out, got {count}")
                held_out += range(rows.contexts - max(1, int(count * HELD_OUT)), rows.contexts)
            trained = len(rows)
            for name, several in () if validation is None else _sets("validation", validation):
                starts.append(len(rows))
                self._add(name, several)
                if len(rows) == starts[-1]:
                    raise ValueError(f"{name}: expected at least 1 question, got none")
            self._digest = rows.finish()
        if validation is None:
            self._train, last = rows.without(held_out)
        else:
            self._train, last = np.arange(trained), np.arange(trained, len(rows))
        self._validation = {} if validation is None else {"validation": len(last)}
        self._held_out = _in_turn(last, starts)

    def _add(self, name: str, examples: Iterable[Example]) -> int:
        """Tokenises the examples of a set; the number of contexts that no set before had."""
        tokenizer, max_context, end, progress = self._options
        before = self._rows.contexts
        bar = tqdm(examples, desc=f"tokenising {name}", unit="question", disable=not progress)
        for index, example in enumerate(bar):
            self._rows.add(_tokenised(f"{name}[{index}]", example, tokenizer, max_context, end))
        return self._rows.contexts - before

    def __getitem__(self, index: int) -> Question:
        """The question of row 0, 1, ..."""
        epoch, place = divmod(index, len(self._train))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self._train))
        return self._rows[self._train[self._order[1][place]]]

    def held_out_rows(self, rows: int) -> list[Question]:
        """Held-out questions, of several sets one each in turn, in their own order."""
        return [self._rows[index] for index in self._held_out[:rows]]

    def collate(self, rows: Sequence[Question]) -> Batch:
        """{"input_ids", "attention_mask": [B, p], "question_ids": [B, q], "answer_ids": [B, a]}, padded at the end."""
        return collate(rows)

    @property
    def rows(self) -> int:
        """Training questions."""
        return len(self._train)

    @property
    def identity(self) -> dict[str, Any]:
        """The questions and the seed."""
        return {"questions": self._digest, "size": self.size, "seed": self.seed} | self._validation


def _sets(
    name: str, examples: Iterable[Example] | Mapping[str, Iterable[Example]]
) -> Iterable[tuple[str, Iterable[Example]]]:
    return examples.items() if isinstance(examples, Mapping) else [(name, examples)]


def _in_turn(indices: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Ascending indices in the order in which sets that begin at `starts` take turns."""
    sets = np.searchsorted(starts, indices, side="right")
    ranks = np.arange(len(indices)) - np.searchsorted(sets, sets)
    return indices[np.lexsort((sets, ranks))]


def _tokenised(name: str, example: Example, tokenizer: Any, max_context: int | None, end: tuple[int, ...]) -> Question:
    if example.question is None or not example.answers:
        raise ValueError(f"{name}: expected a question with an answer, got none")
    context = _ids(tokenizer, example.context, special=True)[:max_context]
    answer = _ids(tokenizer, example.answers[0])
    if not context or not answer:
        raise ValueError(f"{name}: expected a context and an answer of at least 1 token, got none")
    return Question(context, _ids(tokenizer, example.question), answer + end)


class _Rows:
    """Questions as token ids in a store, each context once, of which only places are in memory."""

    def __init__(self, store: IdStore) -> None:
        self.store = store
        self._numbers: dict[bytes, int] = {}
        # Of contexts (start, length), of questions (number of the context, start, lengths of question and answer).
        self._contexts, self._questions = array("q"), array("q")
        self._digest = hashlib.sha256()
        self._ids = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self._questions) // 4

    @property
    def contexts(self) -> int:
        """Different contexts so far."""
        return len(self._numbers)

    def add(self, row: Question) -> None:
        """Appends a question."""
        key = hashlib.blake2b(np.array(row.context, np.int64).tobytes(), digest_size=16).digest()
        number = self._numbers.setdefault(key, len(self._numbers))
        if number * 2 == len(self._contexts):
            self._contexts.extend((self.store.count, len(row.context)))
            self.store.append(np.array(row.context, np.int32))
        self._questions.extend((number, self.store.count, len(row.question), len(row.answer)))
        self.store.append(np.array(row.question + row.answer, np.int32))
        # The JSON of the list of all.
        self._digest.update((", " if len(self._questions) > 4 else "[").encode())
        self._digest.update(json.dumps((row.context, row.question, row.answer)).encode())

    def finish(self) -> str:
        """Ends the list; the first 12 hexadecimal digits of its hash."""
        self._ids = self.store.finish()
        self._digest.update(b"]")
        return self._digest.hexdigest()[:12]

    def without(self, contexts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The indices of questions about other contexts, and about these."""
        held_out = np.isin(np.array(self._questions, np.int64)[::4], np.array(contexts, np.int64))
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def __getitem__(self, index: int) -> Question:
        number, start, question, answer = self._questions[4 * index : 4 * index + 4]
        context_start, length = self._contexts[2 * number : 2 * number + 2]
        cuts = ((context_start, length), (start, question), (start + question, answer))
        return Question(*(tuple(self._ids[at : at + count].tolist()) for at, count in cuts))


def collate(rows: Sequence[Question]) -> Batch:
    """Questions as one batch, see `gistkit.train.batches.collate`."""
    return batches.collate(
        [{batches.CONTEXT: row.context, "question_ids": row.question, "answer_ids": row.answer} for row in rows]
    )


def _ids(tokenizer: Any, tokens: Any, *, special: bool = False) -> tuple[int, ...]:
    if isinstance(tokens, str):
        return tuple(token_ids(tokenizer, tokens, special=special))
    return tuple(torch.as_tensor(tokens).tolist())
