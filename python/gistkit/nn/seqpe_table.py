"""Embeddings of positions that were computed once, for as long as the weights stay what they are."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.layouts.trie import DigitTrie

if TYPE_CHECKING:
    from gistkit.nn.seqpe import SeqPE

# A table of more positions than this, which a few far apart on several axes would need, is not made.
MOST_POSITIONS = 1 << 20

# Mapped over all weights at every look-up, where a loop of Python's would cost more.
_VERSION, _WANTS_GRADIENT = attrgetter("_version"), attrgetter("requires_grad")


class EmbeddingTable:
    """A SeqPE's embeddings of all positions below some extents; copies of the encoder begin with an empty one."""

    def __init__(self, encoder: SeqPE) -> None:
        self._encoder = [encoder]  # in a list: a module would take it for a child of its own
        self._rows = torch.empty(0, 0)
        self._extents: tuple[int, ...] = ()
        self._made_of: list[int] = []
        self._owners: list[Mapping[str, Tensor | None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingTable:
        return EmbeddingTable(memo[id(self._encoder[0])])

    def __getstate__(self) -> dict[str, Any]:
        return {"_encoder": self._encoder, "_rows": torch.empty(0, 0), "_extents": (), "_made_of": [], "_owners": []}

    def wants_gradient(self) -> bool:
        """Whether a weight of the encoder does."""
        return any(map(_WANTS_GRADIENT, self._weights()))

    def _weights(self) -> list[Tensor]:
        # Walking the modules each time would cost more than the look-up; their dicts show a parameter that is replaced.
        if not self._owners:
            self._owners = [module._parameters for module in self._encoder[0].modules() if module._parameters]
        return [p for owner in self._owners for p in owner.values() if p is not None]

    def look_up(self, positions: Tensor) -> Tensor:
        """[..., out_dim], without a gradient."""
        encoder = self._encoder[0]
        weights = self._weights()
        state = [*map(id, weights), *map(Tensor.data_ptr, weights), *map(_VERSION, weights)]
        if state == self._made_of and encoder.axes == 1 and self._rows.is_cpu and not torch.compiler.is_compiling():
            try:
                return F.embedding(positions, self._rows)
            except (IndexError, RuntimeError):
                pass  # below: an error of ours, or a larger table
        highest = DigitTrie.check(positions, axes=encoder.axes, base=encoder.base, digits=encoder.digits)
        if positions.numel() == 0:
            return encoder.encode(encoder.trie(positions))
        needed = tuple(most + 1 for most in highest)
        if state != self._made_of:
            # Nothing may find rows of the weights before, whatever becomes of growing.
            self._rows = torch.empty(0, 0)
            self._extents, self._made_of = (0,) * encoder.axes, state
        if any(have < need for have, need in zip(self._extents, needed, strict=True)):
            extents = tuple(map(max, self._extents, needed))
            if torch.Size(extents).numel() > MOST_POSITIONS:
                return encoder.encode(encoder.trie(positions))
            self._grow(extents)
        if encoder.axes == 1:
            return F.embedding(positions.to(self._rows.device), self._rows)
        index = positions[..., 0]
        for axis in range(1, encoder.axes):
            index = index * self._extents[axis] + positions[..., axis]
        return F.embedding(index.to(self._rows.device), self._rows)

    @torch.no_grad()
    def _grow(self, extents: tuple[int, ...]) -> None:
        encoder = self._encoder[0]
        if encoder.axes == 1:
            more = encoder.encode(encoder.trie(torch.arange(self._extents[0], extents[0])))
            self._rows = torch.cat([self._rows, more]) if self._extents[0] else more
        else:
            grid = torch.cartesian_prod(*(torch.arange(extent) for extent in extents))
            self._rows = encoder.encode(encoder.trie(grid))
        self._extents = extents
