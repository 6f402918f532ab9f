"""MeanStream: texts read on token by token, of which means and recent tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gistkit import hf, ops
from gistkit.compress.held import Held, padded
from gistkit.compress.in_place import TEXT
from gistkit.compress.streaming import Stream
from gistkit.compress.tokens import Rows
from gistkit.hf.keep import Layers

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use
    from gistkit.compress.compressive import Compressive


class HeldMeans(Held):
    """Keys of which means take the place of windows of tokens that are no longer seen as they are.

    A mean counts as a token at the position of its window's last, which is how far a sliding window looks back to it.

    Args:
        reader: whose model and ratio serve.
        layers, ends: as in `Held`; every token of the texts is there.
    """

    def __init__(self, reader: Compressive, layers: Layers, ends: Sequence[int]) -> None:
        self.reader = reader
        # Those of the pass that made the keys: RoPE types that go by the length change the model's with every pass.
        self.frequencies = [inv_freq.clone() for inv_freq in hf.frequencies(reader.compressor.model)]
        positions = [range(end) for end in ends]
        super().__init__(layers, positions, [()] * len(ends), reader.first, ends, reader.segment)
        # Nothing has left yet.
        self.firsts = [0] * len(ends)
        self.clear(ends)

    def _left(self, firsts: Sequence[int]) -> tuple[Layers, list[list[tuple[int, int]]]]:
        """What stays, and in its place among that the means of what leaves, which come behind all columns."""
        ratio = self.reader.compressor.chunk
        held, stay = super()._left(firsts)
        columns: list[list[int]] = []
        windows: list[list[list[int]]] = []
        for row, first in enumerate(firsts):
            leave = [(at, it) for at, it in self._columns(row) if it < first and it not in self.for_good[row]]
            columns.append([at for at, _ in leave])
            windows.append([[*its] for _, its in groupby((it for _, it in leave), lambda it: it // ratio)])
            means = [(held[0][0].shape[2] + index, window[-1]) for index, window in enumerate(windows[-1])]
            self.for_good[row].update(it for _, it in means)
            stay[row] = sorted([*stay[row], *means], key=lambda pair: pair[1])
        return (self._with_means(held, columns, windows) if any(columns) else held), stay

    def _with_means(
        self, held: Layers, columns: Sequence[Sequence[int]], windows: Sequence[Sequence[Sequence[int]]]
    ) -> Layers:
        """Layers, and behind their columns the means of windows, given as positions, of the tokens in `columns`."""
        device = held[0][0].device
        places = padded([[it for window in row for it in window] for row in windows], device)
        offsets = [list(accumulate(map(len, row), initial=0)) for row in windows]
        most = max(map(len, offsets))
        bounds = torch.tensor([row + row[-1:] * (most - len(row)) for row in offsets], device=device)
        # The mean of consecutive position ids.
        middle = torch.zeros(bounds.shape[0], most - 1, dtype=torch.float64, device=device)
        for row, its in enumerate(windows):
            middle[row, : len(its)] = torch.tensor([(it[0] + it[-1]) / 2 for it in its], dtype=torch.float64)
        index = padded(columns, device)[:, None, :, None]
        made = []
        for (key, value), inv_freq in zip(held, self.frequencies, strict=True):
            plain = ops.rerotate(key.take_along_dim(index, 2), -places, inv_freq)
            values = value.take_along_dim(index, 2)
            means = ops.window_pool(plain, values, windows=bounds, positions=middle, inv_freq=inv_freq)
            made.append((torch.cat([key, means[0]], 2), torch.cat([value, means[1]], 2)))
        return made


class MeanStream(Stream):
    """What a `Compressive` reads on, with a cache of about n / ratio + tau of n tokens, once the first pass is over."""

    reader: Compressive

    def _read(self, read: Rows) -> tuple[Tensor, Held]:
        keep = hf.KeptKeys(slice(None))
        hidden = self.reader.hidden(read, keep=keep)
        return hidden, HeldMeans(self.reader, keep.close(), self.ends)

    def _served(self, chosen: Sequence[bool]) -> Use:
        return TEXT
