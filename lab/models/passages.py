"""Batches of passages with a fact in each: the context, what follows it, and a question about the fact."""

from __future__ import annotations

from typing import Any

import numpy as np
from questions import draw_fact, plant
from torch import Tensor

from gistkit.evaluate.data import QUESTION
from gistkit.train import Batches, Corpus
from gistkit.train.batches import Row


class Passages(Batches):
    """Contexts of one length a step, each with a made-up fact, its continuation, and a question with its answer.

    Lengths are drawn evenly from `shortest` to `longest` tokens.
    """

    def __init__(self, corpus: Corpus, shortest: int, longest: int, continuation: int, size: int, seed: int) -> None:
        self.corpus, self.size, self.seed = corpus, size, seed
        self.shortest, self.longest, self.continuation = shortest, longest, continuation
        corpus.check(longest + continuation)
        tokenizer = corpus.tokenizer
        # Of a sentence: a full stop before a space or a new line.
        self._ends = {index for index in range(len(tokenizer)) if tokenizer.decode([index]).rstrip("\n") == "."}
        self._end = tokenizer.eos_token_id
        # The last one that was drawn.
        self._step: tuple[int, list[Row]] | None = None

    def __getitem__(self, index: int) -> Row:
        """{"input_ids", "continuation_ids", "question_ids", "answer_ids"}; a step's rows are drawn together."""
        step, row = divmod(index, self.size)
        if self._step is None or self._step[0] != step:
            random = np.random.default_rng([self.seed, step])
            length = int(random.integers(self.shortest, self.longest + 1))
            whole = length + self.continuation
            starts = random.integers(0, self.corpus.train.numel() - whole + 1, self.size)
            self._step = step, self._rows(self.corpus.passages(starts, whole), length, random)
        return self._step[1][row]

    def held_out_rows(self, rows: int) -> list[Row]:
        """Held-out passages with contexts of the greatest length."""
        random = np.random.default_rng([self.seed, 1 << 40])
        passages = self.corpus.chunks(self.longest + self.continuation, count=rows)
        return self._rows(passages, self.longest, random)

    @property
    def identity(self) -> dict[str, Any]:
        """The corpus, the lengths and the seed."""
        lengths = [self.shortest, self.longest, self.continuation]
        return {"text": self.corpus.digest, "lengths": lengths, "size": self.size, "seed": self.seed}

    def _rows(self, passages: Tensor, length: int, random: np.random.Generator) -> list[Row]:
        rows = []
        for passage in passages.tolist():
            fact = draw_fact(random)
            sentence = self._ids(f" {fact.sentence}")
            cut = length - len(sentence)
            rows.append(
                {
                    "input_ids": plant(passage[:cut], sentence, self._ends, random),
                    "continuation_ids": passage[cut : cut + self.continuation],
                    "question_ids": self._ids(QUESTION.format(question=fact.question)),
                    "answer_ids": [*self._ids(fact.answer), self._end],
                }
            )
        return rows

    def _ids(self, text: str) -> list[int]:
        return list(self.corpus.tokenizer(text, add_special_tokens=False)["input_ids"])
