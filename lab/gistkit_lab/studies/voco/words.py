"""The vocabulary of the study `voco`: questions about mosaics, and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# Kinds of questions: which item is at a cell, how many of an item, and which item is left of another.
KINDS = ("at", "count", "left")


@dataclass(frozen=True)
class Words:
    """The vocabulary: some tokens of their own, kinds of questions, items, cells and numbers, in this order.

    Args:
        items: different ones.
        cells: of a mosaic.
    """

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
        """Tokens of the vocabulary."""
        return self.number(self.cells) + 1
