"""Questions about images, for training a `gistkit.compress.VoCo`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gistkit.common.checks import IGNORE, padded
from gistkit.hf.image_contexts import join_contexts
from gistkit.train.batches import Batch, Epochs
from gistkit.train.data import HELD_OUT


@dataclass(frozen=True)
class ImageQuestion:
    """A question about images.

    Args:
        context: what the model's own processor returned for one text with images, up to the last one: see `VoCo.split`.
        question, answer: token ids of the text between images and answer, and of the answer with its end token.
        answers: all right answers, for an evaluation.
        group: the name of the questions that are one, with its options in different orders; "": it is by itself.
    """

    context: Mapping[str, Any]
    question: Sequence[int]
    answer: Sequence[int]
    answers: tuple[str, ...] = ()
    group: str = ""


class ImageQuestions(Epochs):
    """Questions about images for the loss "qa". Every epoch goes once through them, in its own order.

    Args:
        examples: `ImageQuestion`s by index, at least two. They may be made when they are asked for, as by a torch
            Dataset: they are not kept.
        size: rows B of a batch.
        name: what identifies these examples, for resumption.
        seed: at least 0.
        held_out: indices of the examples that are held out, all of an image or none; None: the last tenth.
    """

    def __init__(
        self,
        examples: Sequence[ImageQuestion],
        size: int,
        name: str,
        seed: int = 0,
        held_out: Sequence[int] | None = None,
    ) -> None:
        if len(examples) < 2:
            raise ValueError(f"examples: expected at least 2, one to hold out, got {len(examples)}")
        count = len(examples)
        chosen = range(count - max(1, int(count * HELD_OUT)), count) if held_out is None else held_out
        super().__init__(size, seed, sorted(set(range(count)).difference(chosen)), list(chosen))
        if not set(range(count)).issuperset(chosen) or not self._held_out or not self._train:
            raise ValueError(
                f"held_out: expected some of the indices 0 to {count - 1}, and not all, got {list(chosen)!r:.60}"
            )
        self.examples, self.name = examples, name

    def row(self, number: int) -> ImageQuestion:
        """The question of an index."""
        return self.examples[number]

    def collate(self, rows: Sequence[ImageQuestion]) -> Batch:
        """The arguments of `VoCo.forward`: contexts as `join_contexts` has them, labels [B, ...] padded with -100."""
        return {
            **join_contexts([row.context for row in rows]),
            "question_ids": padded([list(row.question) for row in rows], IGNORE),
            "answer_ids": padded([list(row.answer) for row in rows], IGNORE),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """The name, the number of examples, the seed, and which are held out."""
        held_out = hashlib.sha256(np.asarray(self._held_out, np.int64).tobytes()).hexdigest()[:12]
        values = {"images": self.name, "examples": len(self.examples), "held_out": held_out}
        return values | {"size": self.size, "seed": self.seed}
