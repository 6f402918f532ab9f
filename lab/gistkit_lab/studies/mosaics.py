"""Mosaics of small images, questions about where items are in them, and the vocabulary of questions and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gistkit_lab.studies.draws import SPLITS
from gistkit_lab.studies.images import Images, resize

# Kinds of questions: which item is at a cell, how many of an item, and which item is left of another.
KINDS = ("at", "count", "left")
# Tokens of a question, its answer the last.
TURN = 4


@dataclass(frozen=True)
class Words:
    """The vocabulary: some tokens of their own, kinds of questions, items, cells and numbers, in this order."""

    items: int
    cells: int

    PAD: ClassVar[int] = 0
    BOS: ClassVar[int] = 1
    EOS: ClassVar[int] = 2
    IMAGE: ClassVar[int] = 3
    QUESTION: ClassVar[int] = 4

    @staticmethod
    def kind(name: str) -> int:
        """What a question begins with behind QUESTION."""
        return 5 + KINDS.index(name)

    def item(self, label: int) -> int:
        """An item by its class."""
        return 5 + len(KINDS) + label

    def cell(self, place: int) -> int:
        """A cell, counted along the rows from 0."""
        return self.item(self.items) + place

    def number(self, count: int) -> int:
        """0 to the number of cells."""
        return self.cell(self.cells) + count

    @property
    def size(self) -> int:
        return self.number(self.cells) + 1


class Batch(NamedTuple):
    """Mosaics with questions.

    Args:
        pixels: float32 [B, channels, size, size].
        labels: int64 [B, cells], the items along the rows.
        text: int64 [B, 4 Q], Q questions in a row, each [QUESTION][kind][what is asked for][answer].
    """

    pixels: Tensor
    labels: Tensor
    text: Tensor


class Mosaics:
    """Mosaics of an image set: training ones by seed and step, and those of two splits, from other images each.

    Their sizes are those of a recipe of the study `voco`.
    """

    def __init__(self, images: Images, recipe: Any, seed: int) -> None:
        self.images, self.recipe, self.seed = images, recipe, seed
        self.words = Words(images.classes, recipe.cells)
        most = recipe.cells + images.classes
        if recipe.questions > most:
            raise ValueError(f"questions: expected at most {most}, each once a mosaic, got {recipe.questions}")

    def __call__(self, stage: int, step: int, rows: int) -> Batch:
        """The training mosaics of step 0, 1, ... of a stage, the same at every call."""
        return self._draw("train", [SPLITS["train"], self.seed, stage, step], rows)

    def split(self, name: str, rows: int) -> Batch:
        """Mosaics of "held_out" or "test", the same for all seeds."""
        return self._draw(name, [SPLITS[name]], rows)

    def _draw(self, split: str, numbers: list[int], rows: int) -> Batch:
        recipe, random = self.recipe, np.random.default_rng(numbers)
        items = getattr(self.images, split)
        chosen = items[torch.from_numpy(random.integers(len(items), size=rows * recipe.cells))]
        cell = recipe.patches * recipe.patch(self.images)
        pixels = resize(self.images.standard(chosen.images), cell)
        # Rows of cells of rows of pixels: each cell's own pixels stay together.
        pixels = pixels.view(rows, recipe.side, recipe.side, -1, cell, cell).permute(0, 3, 1, 4, 2, 5)
        pixels = pixels.reshape(rows, -1, recipe.side * cell, recipe.side * cell)
        labels = chosen.labels.view(rows, recipe.cells)
        text = [self._questions(row, random) for row in labels.tolist()]
        return Batch(pixels, labels, torch.tensor(text).view(rows, -1))

    def _questions(self, items: list[int], random: np.random.Generator) -> list[list[int]]:
        """Different questions about a mosaic in random order; one that has none left of its kind is of another kind."""
        words, side = self.words, self.recipe.side
        alone = [place for place, item in enumerate(items) if place % side and items.count(item) == 1]
        waiting = {
            "at": random.permutation(len(items)).tolist(),
            "count": random.permutation(words.items).tolist(),
            "left": random.permutation(alone).tolist(),
        }
        questions = []
        for number in random.integers(len(KINDS), size=self.recipe.questions):
            kind = next(name for name in (KINDS[number], *KINDS) if waiting[name])
            what = int(waiting[kind].pop())
            match kind:
                case "at":
                    asked, answer = words.cell(what), words.item(items[what])
                case "count":
                    asked, answer = words.item(what), words.number(items.count(what))
                case _:
                    asked, answer = words.item(items[what]), words.item(items[what - 1])
            questions.append([Words.QUESTION, words.kind(kind), asked, answer])
        return questions
