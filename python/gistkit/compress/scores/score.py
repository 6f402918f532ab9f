"""Score: what decides which keys of a layer a memory keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gistkit.common.checks import check_int


@dataclass(frozen=True, eq=False)
class Heads:
    """What one attention layer made of one text of n tokens.

    Args:
        layer: its index.
        query: [Hq, n, D], rotated.
        key, value: [Hk, n, D] and [Hk, n, Dv], keys rotated; query head h reads key head h // (Hq / Hk).
        scale: factor of query key^T.
        inv_freq: frequencies [R/2] of the layer's RoPE; None: gistkit does not know it.
        count: how many keys of each head are kept; of equal shares where layers with a sliding window leave more.
        question: how many of the n tokens, at their end, are a question about the text, whose keys are not kept.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    inv_freq: Tensor | None
    count: int
    question: int = 0

    @property
    def grouped(self) -> Tensor:
        """The queries as [Hk, Hq / Hk, n, D]."""
        return self.query.unflatten(0, (self.key.shape[0], -1))


@dataclass(frozen=True)
class Score:
    """Base of the scores; a subclass is a frozen dataclass with a `name`, whose fields are its arguments.

    A field `sinks` is the number of first tokens that are kept whatever their scores.
    """

    name: ClassVar[str]
    needs_rope: ClassVar[bool] = False
    """Whether it reads `Heads.inv_freq`, which models with another RoPE do not have."""
    reads_question: ClassVar[bool] = False
    """Whether it is another one for another question after the text (`Heads.question`, unless it `reads_again`)."""
    reads_again: ClassVar[bool] = False
    """Whether it needs passes of its own, as `KVzip` does, in place of `__call__`."""

    def __call__(self, heads: Heads) -> Tensor:
        """Scores [Hk, n] of the keys of a layer, float32 or float64; the highest are kept, of equal ones the first."""
        raise NotImplementedError

    def check(self, **least: int) -> None:
        """Refuses fields, by name, that are no whole numbers of at least so many."""
        for name, low in least.items():
            check_int(name, getattr(self, name), low)


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: rounding must not decide which keys are kept."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
