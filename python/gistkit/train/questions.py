"""Question answering for fine-tuning: rows of different lengths, padded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gistkit._checks import IGNORE, padded
from gistkit.evaluate.data import Example
from gistkit.train.batches import CONTEXT, MASK, Batch, Batches, check_size
from gistkit.train.data import HELD_OUT, token_ids


@dataclass(frozen=True)
class Question:
    """Token ids of a context, of the text between it and the answer, and of the answer."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


class QuestionAnswering(Batches):
    """Questions for the loss "qa". Every epoch goes once through the training questions, in its own order.

    The last tenth of the contexts, with all their questions, is held out.

    Args:
        examples: such as from `gistkit.evaluate.load_questions`: context, question and answers as text or token ids;
            the first answer is trained on. At least two different contexts.
        tokenizer: as in `load_corpus`; contexts get its special tokens, as in an evaluation.
        size: rows B of a batch.
        seed: at least 0.
        max_context: contexts are cut to this many tokens; None: never.
        end_token: id after every answer; None: the tokenizer's, if it has one.
        progress: whether to show a progress bar.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Any,
        size: int,
        seed: int = 0,
        *,
        max_context: int | None = None,
        end_token: int | None = None,
        progress: bool = False,
    ) -> None:
        check_size(size, seed)
        if end_token is None:
            end_token = getattr(tokenizer, "eos_token_id", None)
        end = () if end_token is None else (end_token,)
        rows = []
        for index, example in enumerate(tqdm(examples, desc="tokenising", unit="question", disable=not progress)):
            if example.question is None or not example.answers:
                raise ValueError(f"examples[{index}]: expected a question with an answer, got none")
            context = _ids(tokenizer, example.context, special=True)[:max_context]
            answer = _ids(tokenizer, example.answers[0])
            if not context or not answer:
                raise ValueError(f"examples[{index}]: expected a context and an answer of at least 1 token, got none")
            rows.append(Question(context, _ids(tokenizer, example.question), answer + end))
        contexts = list(dict.fromkeys(row.context for row in rows))
        if len(contexts) < 2:
            raise ValueError(f"examples: expected at least 2 different contexts, one to hold out, got {len(contexts)}")
        held_out_contexts = set(contexts[-max(1, int(len(contexts) * HELD_OUT)) :])
        self._train = [row for row in rows if row.context not in held_out_contexts]
        self._held_out = [row for row in rows if row.context in held_out_contexts]
        self.size = size
        self.seed = seed
        values = [(row.context, row.question, row.answer) for row in rows]
        self._digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]

    def __call__(self, step: int) -> Batch:
        """{"input_ids", "attention_mask": [B, p], "question_ids": [B, q], "answer_ids": [B, a]}, padded at the end."""
        count = len(self._train)
        epochs_and_indices = [divmod(number, count) for number in range(step * self.size, (step + 1) * self.size)]
        orders = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(count) for epoch, _ in epochs_and_indices
        }
        return collate([self._train[orders[epoch][index]] for epoch, index in epochs_and_indices])

    def held_out(self, rows: int) -> list[Batch]:
        """Questions about the held-out contexts, in their own order."""
        questions = self._held_out[:rows]
        return [collate(questions[start : start + self.size]) for start in range(0, len(questions), self.size)]

    @property
    def identity(self) -> dict[str, Any]:
        """The questions and the seed."""
        return {"questions": self._digest, "size": self.size, "seed": self.seed}


def collate(rows: Sequence[Question]) -> Batch:
    """Rows of different lengths as one batch: contexts padded with 0 under a mask, questions and answers with -100."""
    context = padded([row.context for row in rows], IGNORE)
    return {
        CONTEXT: context.clamp(min=0),
        MASK: (context != IGNORE).long(),
        "question_ids": padded([row.question for row in rows], IGNORE),
        "answer_ids": padded([row.answer for row in rows], IGNORE),
    }


def _ids(tokenizer: Any, tokens: Any, *, special: bool = False) -> tuple[int, ...]:
    if isinstance(tokens, str):
        return tuple(token_ids(tokenizer, tokens, special=special))
    return tuple(torch.as_tensor(tokens).tolist())
