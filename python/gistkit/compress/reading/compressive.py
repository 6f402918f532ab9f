"""Compressive: a language model that sees its recent tokens, and of the past before them only means."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gistkit import hf, ops
from gistkit.common.checks import padded
from gistkit.compress.methods.avgpool import AvgPool, pooled_keys
from gistkit.compress.methods.in_place import TEXT
from gistkit.compress.reading.cache import StreamCache
from gistkit.compress.reading.language import LanguageModel, Stream
from gistkit.compress.tokens import Rows
from gistkit.hf.cache import MemoryCache
from gistkit.hf.keep import Layers, Rope
from gistkit.layouts import Plan


class Compressive(LanguageModel):
    """The Compressive Transformer (Rae et al.) as Dodo is compared with it: mean pooling of evenly cut text.

    A token sees BOS, the last `tau` tokens, itself included, and means over every `ratio` tokens before those, at the
    mean of their position IDs. As in the paper the means of layer l are those of the hidden states that enter it, with
    its norm and projections; with `past` "kv" they are those of values, and of keys before rotation. A soft prompt in
    BOS's place leads the text if the compressor has one, as the paper's does. (Dodo, Section 5 and Appendix B.3. For a
    context that is known as a whole, this is `AvgPool`.)

    Args:
        compressor: an AvgPool; its model, ratio, `past`, `soft_prompt` and the adapter "text" are used.
        tau, segment: see `gistkit.layouts.dodo`. The tokens between the last whole window and the recent tokens, at
            most ratio - 1 and none where `ratio` divides segment and tau, are seen uncompressed too.
    """

    def __init__(self, compressor: AvgPool, *, tau: int = 128, segment: int = 32) -> None:
        if not isinstance(compressor, AvgPool):
            raise TypeError(f"compressor: expected an AvgPool, got {type(compressor).__name__}")
        if compressor.past == "kv":
            hf.check_rotates(compressor.model)
        super().__init__(compressor, tau, segment)

    @property
    def title(self) -> str:
        return f"Compressive {self.compressor.chunk}x, tau {self.tau}"

    def first(self, position: int) -> int:
        """The first position that a token at `position` sees uncompressed, the beginning of a window."""
        return super().first(position) // self.compressor.chunk * self.compressor.chunk

    def embedded(self, rows: Rows) -> Tensor:
        inputs, prompt = super().embedded(rows), self.compressor.soft_prompt
        if prompt is None:
            return inputs
        return torch.cat([prompt.to(inputs.dtype).expand(inputs.shape[0], 1, -1), inputs[:, 1:]], 1)

    def plan(self, seen: int) -> Plan:
        compressor = self.compressor
        spans = torch.from_numpy(self._spans(seen, None))
        cuts = {window: torch.from_numpy(self._spans(seen, window))[None] for window in compressor.lm.windows}
        means = len(self._bounds(seen)) - 1
        plan = Plan.from_spans(spans, seen + means, torch.arange(seen))
        return plan.with_windows(cuts).to(compressor.device)

    def _bounds(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where the windows of the means begin, and where the last one ends; BOS is in no window."""
        ratio = self.compressor.chunk
        return np.unique(np.maximum(np.arange(0, count // ratio + 1) * ratio, 1))

    def _spans(self, count: int, window: int | None) -> np.ndarray[Any, np.dtype[np.int32]]:
        row = np.arange(count)
        first = np.array([self.first(start) for start in range(0, count, self.segment)]).repeat(self.segment)[:count]
        bounds = self._bounds(count)
        # A sliding window keeps a mean if it keeps its last token.
        oldest = np.zeros_like(row) if window is None else np.maximum(row - window + 1, 0)
        first_mean = np.searchsorted(bounds[1:] - 1, oldest)
        bos = np.stack([np.zeros_like(row), (oldest == 0).astype(row.dtype)], 1)
        recent = np.stack([np.maximum(first, oldest), row + 1], 1)
        recent[:, 0] = np.maximum(recent[:, 0], bos[:, 1])
        recent[0] = 0
        end_mean = np.searchsorted(bounds[1:], first, side="right")
        older = count + np.stack([first_mean, np.maximum(end_mean, first_mean)], 1)
        spans = np.stack([bos, recent, older], 1)
        # Empty ones come last.
        nonempty = spans[..., 1] > spans[..., 0]
        order = np.argsort(~nonempty, axis=1, kind="stable")
        spans = np.where(nonempty[..., None], spans, 0)
        return np.take_along_axis(spans, order[..., None], 1).astype(np.int32)

    def extend(self, count: int) -> Any:
        compressor = self.compressor
        if len(self._bounds(count)) < 2:
            return None
        windows = torch.from_numpy(self._bounds(count)).to(compressor.device)
        position_ids = torch.arange(count, device=compressor.device)
        # The mean of consecutive position IDs.
        middle = (windows[:-1] + windows[1:] - 1).double() / 2
        if compressor.past == "hidden":
            return HiddenMeans(windows, middle)
        frequencies: list[Tensor] = []

        def extend(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if not frequencies:
                # Read within the pass, because RoPE types that depend on the length change them there.
                frequencies.extend(hf.frequencies(compressor.model))
            means = pooled_keys(key, value, position_ids, windows, middle, frequencies[layer])
            return torch.cat([key, means[0]], 2), torch.cat([value, means[1]], 2)

        return extend


class HiddenMeans:
    """Appends the projected means over `windows` int64 [W + 1] of a layer's input, at `middle` [W]; see `attach`."""

    def __init__(self, windows: Tensor, middle: Tensor) -> None:
        self.windows, self.middle = windows, middle
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, layer_idx: int, layer: nn.Module, before: Tensor, rope: Rope) -> None:
        """Makes the means' keys and values of a layer from its input [B, N, d]."""
        means = ops.window_pool(before, windows=self.windows)
        self._made[layer_idx] = rope.project(layer, means, self.middle)

    def __call__(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, and after them those of the means."""
        # Kept: checkpointing may run a layer again without the hooks around it.
        made_key, made_value = self._made[layer_idx]
        return torch.cat([key, made_key], 2), torch.cat([value, made_value], 2)


class MeanCache(StreamCache):
    """A cache in which means replace windows of tokens that are no longer seen uncompressed.

    A mean counts as a token at the position of its window's last token, which is what sliding windows compare.
    `frequencies` are those of each layer's RoPE in the pass that made the keys, which are of all tokens of the texts.
    """

    def __init__(
        self, reader: Compressive, layers: Layers, ends: Sequence[int], frequencies: Sequence[Tensor] = ()
    ) -> None:
        self.reader, self.frequencies = reader, frequencies
        positions = [range(end) for end in ends]
        super().__init__(layers, positions, [()] * len(ends), reader.first, ends, reader.segment)
        # Nothing has left yet.
        self.firsts = [0] * len(ends)
        self.clear(ends)

    def _remaining(self, firsts: Sequence[int]) -> tuple[Layers, list[list[tuple[int, int]]]]:
        """The columns that stay, and in order among them the means of what leaves, appended after all columns."""
        ratio = self.reader.compressor.chunk
        layers, remaining = super()._remaining(firsts)
        columns: list[list[int]] = []
        windows: list[list[list[int]]] = []
        for row, first in enumerate(firsts):
            leaving = [
                (column, position)
                for column, position in self._columns(row)
                if position < first and position not in self.for_good[row]
            ]
            columns.append([column for column, _ in leaving])
            windows.append(
                [[*window] for _, window in groupby((position for _, position in leaving), lambda at: at // ratio)]
            )
            means = [(layers[0][0].shape[2] + index, window[-1]) for index, window in enumerate(windows[-1])]
            remaining[row] = sorted([*remaining[row], *means], key=lambda pair: pair[1])
        layers = self._with_means(layers, columns, windows) if any(columns) else layers
        for own, made in zip(self.for_good, windows, strict=True):
            own.update(window[-1] for window in made)
        return layers, remaining

    def _with_means(
        self, layers: Layers, columns: Sequence[Sequence[int]], windows: Sequence[Sequence[Sequence[int]]]
    ) -> Layers:
        """Layers with the means of windows, given as positions, of the tokens in `columns` appended."""
        device = layers[0][0].device
        offsets = [list(accumulate(map(len, row), initial=0)) for row in windows]
        most = max(map(len, offsets))
        bounds = torch.tensor([row + row[-1:] * (most - len(row)) for row in offsets], device=device)
        # The mean of consecutive position IDs.
        centres = [torch.tensor([window[0] + window[-1] for window in row], dtype=torch.float64) / 2 for row in windows]
        middle = pad_sequence(centres, batch_first=True).to(device)
        position_ids = padded([[position for window in row for position in window] for row in windows], device=device)
        return self._append(layers, padded(columns, device=device)[:, None, :, None], position_ids, bounds, middle)

    def _append(self, layers: Layers, index: Tensor, position_ids: Tensor, bounds: Tensor, middle: Tensor) -> Layers:
        """Layers with the means over `bounds` of the columns `index`, at position IDs `middle`, appended."""
        extended = []
        for (key, value), inv_freq in zip(layers, self.frequencies, strict=True):
            left = key.take_along_dim(index, 2), value.take_along_dim(index, 2)
            means = pooled_keys(*left, position_ids, bounds, middle, inv_freq)
            extended.append((torch.cat([key, means[0]], 2), torch.cat([value, means[1]], 2)))
        return extended


class LayerInputs(hf.KeptKeys):
    """Keeps each layer's input [B, N, d], module and RoPE beside some rows of its keys and values."""

    def __init__(self, rows: slice) -> None:
        super().__init__(rows)
        self.inputs: dict[int, tuple[Tensor, nn.Module, Rope]] = {}

    def leave(self, layer_idx: int, layer: nn.Module, before: Tensor, after: Tensor, rope: Rope) -> None:
        """Keeps the layer's input."""
        self.inputs[layer_idx] = before, layer, rope.kept()

    @property
    def columns(self) -> list[Tensor]:
        """The inputs of all layers in order, [B, 1, N, d], as a cache holds keys."""
        return [self.inputs[layer_idx][0][:, None] for layer_idx in sorted(self.inputs)]


class HiddenMeanCache(MeanCache):
    """A `MeanCache` whose means are of hidden states: it holds the inputs of all layers for tokens without a mean."""

    def __init__(self, reader: Compressive, kept: LayerInputs, ends: Sequence[int]) -> None:
        self.decoder_layers = [kept.inputs[layer_idx][1:] for layer_idx in sorted(kept.inputs)]
        self._step: LayerInputs | None = None
        # An input is handled as a key without a value.
        inputs = [(states, states[..., :0]) for states in kept.columns]
        super().__init__(reader, [*kept.close(), *inputs], ends)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(states.nbytes for states, _ in self.inputs.held)

    def keeper(self) -> hf.Keeper:
        """Collects the inputs of the layers at a new token."""
        self._step = LayerInputs(slice(0, 0))
        return self._step

    def add(self, positions: Sequence[int], stay: Sequence[bool]) -> None:
        super().add(positions, stay)
        if self._step is not None:
            for layer_idx, states in enumerate(self._step.columns):
                self.inputs.update(states, states[..., :0], layer_idx)
            self._step = None

    def _caches(self) -> list[MemoryCache]:
        return [*super()._caches(), self.inputs]

    def _put(self, layers: Layers) -> None:
        count = len(self.decoder_layers)
        super()._put(layers[:count])
        self.inputs = hf.memory_cache(layers[count:], 0, capacity=self.room)

    def _append(self, layers: Layers, index: Tensor, position_ids: Tensor, bounds: Tensor, middle: Tensor) -> Layers:
        count = len(self.decoder_layers)
        extended, inputs = [], []
        with self.reader.compressor.using(TEXT):
            for (key, value), (states, _), (layer, rope) in zip(
                layers[:count], layers[count:], self.decoder_layers, strict=True
            ):
                means = ops.window_pool(states[:, 0].take_along_dim(index[:, 0], 1), windows=bounds)
                made_key, made_value = rope.project(layer, means, middle)
                extended.append((torch.cat([key, made_key], 2), torch.cat([value, made_value], 2)))
                # A mean is never pooled again.
                states = torch.cat([states, means[:, None]], 2)
                inputs.append((states, states[..., :0]))
        return [*extended, *inputs]


class MeanStream(Stream):
    """The stream of a `Compressive`, whose cache holds about n / ratio + tau of n tokens after the first pass."""

    reader: Compressive

    def _first_pass(self, rows: Rows) -> tuple[Tensor, StreamCache]:
        if self.reader.compressor.past == "hidden":
            kept = LayerInputs(slice(None))
            return self.reader.hidden(rows, keep=kept), HiddenMeanCache(self.reader, kept, self.ends)
        keep = hf.KeptKeys(slice(None))
        hidden_states = self.reader.hidden(rows, keep=keep)
        # Copies: RoPE types that depend on the length change the model's in every pass.
        frequencies = [inv_freq.clone() for inv_freq in hf.frequencies(self.reader.compressor.model)]
        return hidden_states, MeanCache(self.reader, keep.close(), self.ends, frequencies)


Compressive.stream = MeanStream
