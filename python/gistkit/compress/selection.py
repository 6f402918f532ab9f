"""Selection: keeps of each layer and key head of a pass the keys and values with the highest scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gistkit import hf, ops
from gistkit.common.checks import moved
from gistkit.compress.matching import References, matched
from gistkit.compress.scores import Heads, Score

# Weights of queries that heads are fitted to together on a GPU, half a GiB of them.
TOGETHER = 2**27


class Repeated(NamedTuple):
    """What passes that repeat a text find, of each layer.

    Args:
        scores: [Hk, n], of its keys.
        references: queries that read it, of layers without a sliding window; {} where nothing is fitted.
    """

    scores: dict[int, Tensor]
    references: dict[int, References]


def chosen(scores: Sequence[Tensor], count: int, least: int) -> Sequence[Tensor]:
    """Which keys stay of layers with scores [Hk, n] of each, as bool [Hk, n]: the highest, of equal ones the first.

    Args:
        count: of a head, on average.
        least: of each head.
    """
    together = torch.cat([*scores])
    best = torch.sort(together, dim=-1, descending=True, stable=True).indices[:, :least]
    found = torch.zeros_like(together, dtype=torch.bool).scatter_(1, best, True)
    others = together.masked_fill(found, -torch.inf).flatten()
    more = torch.sort(others, descending=True, stable=True).indices[: (count - least) * len(together)]
    found.view(-1)[more] = True
    return found.split([len(layer) for layer in scores])


def pyramid(count: int, length: int, layers: int, window: int = 1) -> list[int]:
    """How many of `length` tokens each head of each layer keeps, `count` on average, lower layers more (PyramidKV).

    The top layer has 1/20 of an equal share; no layer keeps over `length`.

    Args:
        window: tokens that every layer keeps; if the top layer cannot, all layers keep as many.
    """
    top = count / 20
    bottom = 2 * count - top
    if bottom >= length - window:
        bottom = length - window
        top = 2 * count - bottom
    if layers == 1 or not length >= bottom >= top >= window:
        return [count] * layers
    step = (bottom - top) / (layers - 1)
    return [round(bottom - layer * step) for layer in range(layers)]


@torch.no_grad()
def _fitted(references: References, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Biases like `index`, [Hk, K], and the changes [Hk, K, Dv] of the values there, of a row's key and value."""
    length = value.shape[1]
    together = 1 if value.is_cpu else max(1, TOGETHER // (references.query.shape[1] * length))
    fits = []
    for first in range(0, len(index), together):
        heads = slice(first, first + together)
        fits.append(matched(references, heads, key[heads], value[heads], index[heads]))
    biases, values = (torch.cat(each) for each in zip(*fits, strict=True))
    # Of a head that keeps everything nothing is missing.
    none = (index < 0) | ((index >= 0).sum(-1, keepdim=True) == length)
    changes = values - value.take_along_dim(index.clamp(min=0)[..., None], 1)
    return biases.masked_fill(none, 0), changes.masked_fill(none[..., None], 0)


def _places(chosen: Sequence[Tensor], width: int | None) -> Tensor:
    """int64 [B, Hk, K], the places of what is chosen, bool [Hk, n] of each row, ascending, and then -1.

    Args:
        width: K; None: as many as a head has at most, for which the host waits.
    """
    width = max(int(row.sum(-1).max()) for row in chosen) if width is None else width
    index = chosen[0].new_full((len(chosen), len(chosen[0]), width), -1, dtype=torch.int64)
    for row, own in enumerate(chosen):
        ordered = torch.sort(own.int(), dim=-1, descending=True, stable=True)
        count = min(width, own.shape[-1])
        index[row, :, :count] = ordered.indices.where(ordered.values > 0, -1)[:, :count]
    return index


class Selection(hf.Keeper):
    """Keeps of each layer and key head the keys with the highest scores, in their order.

    Args:
        lengths: tokens of each row.
        counts: how many of them are kept.
        score: of the keys of one row.
        closed: keys are rotated to positions 0, 1, ..
        frequencies: of the RoPE of the layer of an index, during the pass; None where gistkit does not know it.
        question: tokens of a question after each row, whose keys are not kept.
        shares: as of `Select`.
        depth: layers of the model, for a pyramid.
        sinks: how many of the score's first tokens are kept whatever their scores; None: all.
        whole: keep all keys and values until `select` chooses among them; else each layer's are chosen in the pass.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        score: Score,
        closed: bool,
        frequencies: Callable[[int], Tensor | None],
        question: int = 0,
        shares: str = "equal",
        depth: int = 1,
        sinks: int | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__()
        first = getattr(score, "sinks", 0)
        self.sinks = first if sinks is None else min(first, sinks)
        self.question, self.shares = question, shares
        self.lengths, self.counts, self.score = lengths, counts, score
        # How many tokens of each row layers with a sliding window keep, and the layers without one.
        self.last, self.full = tuple(counts), list(range(depth))
        self.closed, self.frequencies = closed, frequencies
        self.whole = whole
        # Window and frequencies of each layer, and of each row the scores [Hk, n] of layers without a window.
        self._about: dict[int, tuple[int | None, Tensor | None]] = {}
        self.scores: list[dict[int, Tensor]] = [{} for _ in lengths]
        # Of each layer, what was chosen, int64 [B, Hk, K], then -1 in heads with less.
        self.places: dict[int, Tensor] = {}
        # Of each row and fitted layer, biases [Hk, K] of what was chosen, and the changes [Hk, K, Dv] of its values.
        self.fits: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in lengths]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Keeps key and value, or what is chosen of them."""
        inv_freq, scores = self.frequencies(layer_idx), list[Tensor]()
        if window is None and not self.score.reads_again:
            scores = self._scores(layer_idx, query, key, value, scale, inv_freq)
        if not self.whole:
            windows = {} if window is None else {layer_idx: window}
            found = [Repeated({layer_idx: own}, {}) for own in scores]
            self.choose({layer_idx: (key, value)}, found.__getitem__, windows, {layer_idx: inv_freq})
            return
        self._about.setdefault(layer_idx, (window, None if inv_freq is None else inv_freq.clone()))
        for row, own in zip(self.scores, scores, strict=False):
            row.setdefault(layer_idx, own)
        self.keep(layer_idx, key, value)

    @torch.no_grad()
    def _scores(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, inv_freq: Tensor | None
    ) -> list[Tensor]:
        """[Hk, n] of each row."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        found = []
        for row, (length, count) in enumerate(zip(self.lengths, self._counts(layer), strict=True)):
            q, k, v = (tensor[row, :, : length + self.question] for tensor in (query, key, value))
            found.append(self.score(Heads(layer, q, k, v, scale, inv_freq, count, self.question))[:, :length])
        return found

    def _counts(self, layer: int) -> Sequence[int]:
        """How many tokens of each row a head of a layer keeps, on average."""
        if self.shares != "pyramid":
            return self.counts
        # Those of a question are not kept.
        window = 1 if self.question else getattr(self.score, "window", 1)
        rows = zip(self.counts, self.lengths, strict=True)
        place, depth = self.full.index(layer), len(self.full)
        return [pyramid(count, length, depth, min(window, length // 2))[place] for count, length in rows]

    def _width(self, layer: int, rows: slice = slice(None)) -> int | None:
        """How many tokens each head of a layer keeps at most of some rows; None where heads differ."""
        return max(self._counts(layer)[rows]) if self.shares in ("equal", "pyramid") else None

    def _chosen(self, scores: Sequence[Tensor], count: int) -> Sequence[Tensor]:
        places = torch.arange(self.sinks, device=scores[0].device).clamp(max=scores[0].shape[1] - 1)
        scores = [own.index_fill(1, places, torch.inf) for own in scores]
        # AdaKV's heads have a fifth of an equal share at least.
        return chosen(scores, count, {"heads": count // 5, "all": 0}.get(self.shares, count))

    def _last(self, key: Tensor) -> Tensor:
        """int64 [B, Hk, K], the last tokens of each row, and then -1."""
        count, length = (torch.tensor(numbers)[:, None, None] for numbers in (self.last, self.lengths))
        columns = torch.arange(max(self.last))
        index = (length - count + columns).where(columns < count, -1)
        return moved(index, key.device).expand(-1, key.shape[1], -1)

    def choose(
        self,
        layers: Mapping[int, tuple[Tensor, Tensor]],
        found: Callable[[int], Repeated],
        windows: Mapping[int, int],
        inv_freqs: Mapping[int, Tensor | None] | None = None,
    ) -> None:
        """Keeps what scores choose of the keys and values that a pass has left, all heads at once.

        Args:
            layers: key and value of each.
            found: scores of a row, and references for which values and biases are fitted. Those of one row are alive
                at a time, as they may take more than its keys and values.
            windows: widths of layers with a sliding window, which keep the last tokens.
            inv_freqs: of each layer's RoPE, to close up positions.
        """
        full = [layer for layer in sorted(layers) if layer not in windows]
        if self.whole and self.shares != "equal":
            self._share(layers, windows, full)
        pools = [full] if self.shares == "all" else [[layer] for layer in full]
        stay: dict[int, list[Tensor]] = {layer: [] for layer in full}
        for row in range(len(self.lengths)) if full else ():
            self.fits[row] |= self._choose_row(row, layers, found(row), pools, stay)
        kept = {
            layer: _places(stay[layer], self._width(layer)) if layer in stay else self._last(layers[layer][0])
            for layer in layers
        }
        most = torch.stack([(index >= 0).sum(-1).amax(1) for index in kept.values()]).amax(0)
        for layer, (key, value) in layers.items():
            ends = most if layer in windows else None
            self._take(layer, key, value, kept[layer], (inv_freqs or {}).get(layer), ends)

    def _share(
        self, layers: Mapping[int, tuple[Tensor, Tensor]], windows: Mapping[int, int], full: Sequence[int]
    ) -> None:
        """Divides the bytes of equal shares: layers with a window keep the same part of what text behind sees there."""
        self.full = list(full)
        if not windows:
            return
        seen, split = max(1, max(windows.values()) - 1), []
        # Numbers of a token.
        more, of = (
            sum(part.shape[1] * part.shape[3] for layer in some for part in layers[layer]) for some in (windows, full)
        )
        for length, count in zip(self.lengths, self.counts, strict=True):
            # Where the others keep all, what is left is theirs again.
            last = max(1, min(seen, length) * count // length, count + (count - length) * of // more)
            last = min(count, seen, last)
            split.append((last, min(length, count + (count - last) * more // of) if of else count))
        self.last, self.counts = zip(*split, strict=True)

    def _choose_row(
        self,
        row: int,
        layers: Mapping[int, tuple[Tensor, Tensor]],
        found: Repeated,
        pools: Sequence[Sequence[int]],
        stay: Mapping[int, list[Tensor]],
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Adds what stays of a row to `stay`; its fits, of each layer."""
        for pool in pools:
            count = self._counts(pool[0])[row]
            for layer, own in zip(pool, self._chosen([found.scores[layer] for layer in pool], count), strict=True):
                stay[layer].append(own)
        fits = {}
        for layer, references in found.references.items():
            key, value = (tensor[row, :, : self.lengths[row]] for tensor in layers[layer])
            width = self._width(layer, slice(row, row + 1))
            fits[layer] = _fitted(references, key, value, _places(stay[layer][-1:], width)[0])
        return fits

    def key_bias(self, width: int) -> Tensor | None:
        """Biases [B, `width`, A] of A layers and heads; None where nothing was fitted."""
        if not any(self.fits):
            return None
        biases = []
        for layer, index in sorted(self.places.items()):
            bias = torch.zeros(*index.shape[:2], width, device=index.device)
            for row, fits in zip(bias, self.fits, strict=True):
                if layer in fits:
                    own = fits[layer][0]
                    row[:, : own.shape[1]] = own
            biases.append(bias)
        return torch.cat(biases, 1).mT

    def _take(
        self,
        layer_idx: int,
        key: Tensor,
        value: Tensor,
        index: Tensor,
        inv_freq: Tensor | None,
        ends: Tensor | None,
    ) -> None:
        """Keeps the places of `index`; closed, from 0 on, or where they end right before `ends` [B], the text."""
        self.places.setdefault(layer_idx, index)
        source, none = index.clamp(min=0), (index < 0)[..., None]
        key, value = (tensor.take_along_dim(source[..., None], 2).masked_fill(none, 0) for tensor in (key, value))
        if any(layer_idx in fits for fits in self.fits):
            changes = torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
            for change, fits in zip(changes, self.fits, strict=True):
                own = fits[layer_idx][1]
                change[:, : own.shape[1]] = own
            value = (value + changes).to(value.dtype)
        if self.closed and inv_freq is not None:
            delta = torch.arange(index.shape[-1], device=index.device) - source
            if ends is not None:
                delta += (ends[:, None] - (index >= 0).sum(-1))[..., None]
            moved = ops.rerotate(key.flatten(0, 1)[:, None], delta.flatten(0, 1), inv_freq)
            key = moved[:, 0].unflatten(0, key.shape[:2])
        self.keep(layer_idx, key, value)

    def select(self, repetition: Callable[[int], Repeated] | None) -> None:
        """Of what was kept whole keeps what the pass's scores choose, or those of a row's repetition, which fits it."""

        def found(row: int) -> Repeated:
            again = Repeated(self.scores[row], {}) if repetition is None else repetition(row)
            return again if self.score.reads_again else again._replace(scores=self.scores[row])

        layers, self._layers = self._layers, {}
        windows = {layer: window for layer, (window, _) in self._about.items() if window is not None}
        inv_freqs = {layer: inv_freq for layer, (_, inv_freq) in self._about.items()}
        self.choose(layers, found, windows, inv_freqs)
