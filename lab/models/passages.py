"""Batches of passages with a fact in each: the context, what follows it, and a question about the fact."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from questions import draw_fact, plant
from torch import Tensor

from gistkit._checks import IGNORE, padded
from gistkit.evaluate.data import QUESTION
from gistkit.train import Batches, Corpus
from gistkit.train.batches import Batch


class Passages(Batches):
    """Contexts of one length a step, each with a made-up fact, its continuation, and a question with its answer.

    Args:
        corpus: of a tokenizer.
        shortest, longest: tokens of a context, drawn evenly.
        continuation: tokens that follow it.
        size: rows of a batch.
        seed: at least 0.
    """

    def __init__(self, corpus: Corpus, shortest: int, longest: int, continuation: int, size: int, seed: int) -> None:
        self.corpus, self.size, self.seed = corpus, size, seed
        self.shortest, self.longest, self.continuation = shortest, longest, continuation
        corpus.check(longest + continuation)
        tokenizer = corpus.tokenizer
        # Of a sentence: a full stop before a space or a new line.
        self._ends = {index for index in range(len(tokenizer)) if tokenizer.decode([index]).rstrip("\n") == "."}
        self._end = tokenizer.eos_token_id

    def __call__(self, step: int) -> Batch:
        """{"input_ids": [B, n], "continuation_ids": [B, m], "question_ids": [B, q], "answer_ids": [B, a]}."""
        random = np.random.default_rng([self.seed, step])
        length = int(random.integers(self.shortest, self.longest + 1))
        whole = length + self.continuation
        starts = random.integers(0, self.corpus.train.numel() - whole + 1, self.size)
        return self._batch(self.corpus.passages(starts, whole), length, random)

    def held_out(self, rows: int) -> list[Batch]:
        """Held-out passages with contexts of the greatest length."""
        random = np.random.default_rng([self.seed, 1 << 40])
        whole = self.longest + self.continuation
        passages = self.corpus.chunks(whole, count=rows)
        return [self._batch(part, self.longest, random) for part in passages.split(self.size)]

    @property
    def identity(self) -> dict[str, Any]:
        """The corpus, the lengths and the seed."""
        lengths = [self.shortest, self.longest, self.continuation]
        return {"text": self.corpus.digest, "lengths": lengths, "size": self.size, "seed": self.seed}

    def _batch(self, passages: Tensor, length: int, random: np.random.Generator) -> Batch:
        contexts, continuations, questions, answers = [], [], [], []
        for row in passages.tolist():
            fact = draw_fact(random)
            sentence = self._ids(f" {fact.sentence}")
            cut = length - len(sentence)
            contexts.append(plant(row[:cut], sentence, self._ends, random))
            continuations.append(row[cut : cut + self.continuation])
            questions.append(self._ids(QUESTION.format(question=fact.question)))
            answers.append([*self._ids(fact.answer), self._end])
        return {
            "input_ids": torch.tensor(contexts),
            "continuation_ids": torch.tensor(continuations),
            "question_ids": padded(questions, IGNORE),
            "answer_ids": padded(answers, IGNORE),
        }

    def _ids(self, text: str) -> list[int]:
        return list(self.corpus.tokenizer(text, add_special_tokens=False)["input_ids"])
