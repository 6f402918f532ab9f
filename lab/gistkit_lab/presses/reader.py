"""PressReader: reads a context once, and makes of that pass the memory of any selection, of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gistkit import hf
from gistkit.compress import AvgPool, Compressor, Memory, Select
from gistkit.compress.matching import References
from gistkit.compress.methods.in_place import TEXT
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.scores import Even, Heads, Score
from gistkit.compress.selection import Repeated, Selection
from gistkit.compress.tokens import pad
from gistkit.hf.keep import Layers


@dataclass(frozen=True, eq=False)
class Text:
    """A context as the model has read it."""

    # Keys and values [1, Hk, n, D] of all layers, and the widths of sliding windows.
    layers: Layers
    windows: list[int | None]
    # [n, d], outputs.
    states: Tensor
    # [Hk, n] of each layer's keys, by the name of the score.
    scores: dict[str, list[Tensor]] = field(default_factory=dict)
    # Queries of each layer that read it again, for fits.
    references: dict[int, References] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens, BOS among them."""
        return int(self.states.shape[0])


class PressReader:
    """The model in one state: plain, or with the adapter that a trained compressor answers with.

    Args:
        model: a transformers decoder model.
        tokenizer: of it; KVzip needs it.
        scores: by name.
        adapted: the compressor around `model` whose adapters all passes run with; None: the model without any.
        fit: texts get references; one of the scores has to read them again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        scores: Mapping[str, Score],
        adapted: Compressor | None = None,
        fit: bool = False,
    ) -> None:
        self.model, self.adapted = model, adapted
        # It reads all memories of this class, and is asked for nothing else.
        self.select: Select = self._adapted(Select(model, ratio=1, by="even"))
        self.scores: dict[str, Select] = {
            by: self._adapted(Select(model, ratio=1, by=score, fit=fit)) for by, score in scores.items()
        }
        for select in self.scores.values():
            select.tokenizer = tokenizer

    def _adapted(self, compressor: Any) -> Any:
        if self.adapted is not None:
            compressor.lm, compressor.reader = self.adapted.lm, self.adapted.reader
        return compressor.eval()

    def pooled(self, ratio: int) -> Compressor:
        """AvgPool whose means nobody has learned to read."""
        return self._adapted(_Pooled(self.model, ratio=ratio, lora=None))  # type: ignore[no-any-return]

    def read(self, context: Sequence[int], *, scored: bool = True) -> Text:
        """One pass over BOS and a context, and those that scores need beside it."""
        select = self.select
        rows = select.with_bos(select.contexts([list(context)]))
        keep = _Kept(select.frequencies, {by: one.score for by, one in self.scores.items()} if scored else {})
        plan = select.lm.causal_plan(rows.ids.shape[1])
        inputs = select.lm.embedded(TEXT, rows.ids)
        out = select.lm.run(TEXT, inputs_embeds=inputs, plan=plan, keep=keep)
        text = Text(keep.layers, keep.windows, out.last_hidden_state[0].clone(), keep.scores)
        for by, one in self.scores.items() if scored else ():
            if one.score.reads_again:
                found = one.repetition(rows, text.layers, 0)
                text.scores[by] = [found.scores[layer] for layer in range(len(text.layers))]
                text.references.update(found.references)
        return text

    def first(self, text: Text, count: int) -> Memory:
        """The first tokens, behind which the text goes on; all of them are the full context."""
        ordinals = torch.arange(count)[None]
        return Memory(
            source=self.select.source,
            lengths=(count,),
            context_lengths=(text.length - 1,),
            positions=ordinals,
            ordinals=ordinals,
            starts=(count,),
            layers=tuple((key[:, :, :count].clone(), value[:, :, :count].clone()) for key, value in text.layers),
            last=text.states[None, count - 1],
        )

    def scored(
        self, text: Text, by: str, count: int, shares: str = "equal", fit: bool = False, sinks: int | None = None
    ) -> Memory:
        """The `count` tokens of each key head, or of a mean one, that a score chooses, as `Select` does.

        `sinks` first tokens are kept whatever their scores; None: all of the score's own.
        """

        def scores(layer: int) -> Tensor:
            if by in text.scores:
                return text.scores[by][layer]
            key, value = (tensor[0] for tensor in text.layers[layer])
            # Of those that look at places alone no other depends on the number.
            return self.scores[by].score(Heads(layer, key, key, value, 1.0, None, count))

        return self._chosen(text, by, count, scores, shares, fit, sinks)

    def asked(self, text: Text, by: str, question: Sequence[int], count: int) -> Memory:
        """The context's tokens that a score chooses for a question, which has read the context."""
        select, length = self.select, text.length
        one = self.scores[by]
        if one.score.reads_again:
            found = one.read_again(text.layers, [(slice(0, length), one.answered(text.layers, question))], one.reader)
            return self._chosen(text, by, count, lambda layer: found.scores[layer])
        row = ReadingRow(length, b"", np.arange(length).tobytes(), length, length, (len(question),))
        plan = decoder_plan((row,), length, (len(question),), True, select.lm.windows, str(select.device))
        keep = _Kept(self.select.frequencies, {})
        inputs = select.lm.embedded(TEXT, pad([question], select.device).ids)
        select.lm.run(TEXT, inputs_embeds=inputs, plan=plan, memory=text.layers, keep=keep)

        def scores(layer: int) -> Tensor:
            both = zip(text.layers[layer], keep.layers[layer], strict=True)
            key, value = (torch.cat([context[0], own[0]], 1) for context, own in both)
            query, scale = keep.queries[layer]
            heads = Heads(layer, query, key, value, scale, select.frequencies(layer), count, len(question))
            return self.scores[by].score(heads)[:, :length]

        return self._chosen(text, by, count, scores)

    def _chosen(
        self,
        text: Text,
        by: str,
        count: int,
        scores: Callable[[int], Tensor],
        shares: str = "equal",
        fit: bool = False,
        sinks: int | None = None,
    ) -> Memory:
        """Keys with the highest scores [Hk, n]; the last ones in layers with a window."""
        windows = {layer: window for layer, window in enumerate(text.windows) if window is not None}
        score = self.scores[by].score
        keep = Selection(
            (text.length,), (count,), score, False, self.select.frequencies, shares=shares, sinks=sinks, whole=True
        )
        own = {layer: scores(layer) for layer in range(len(text.layers)) if layer not in windows}
        found = Repeated(own, text.references if fit else {})
        keep.choose(dict(enumerate(text.layers)), lambda row: found, windows)
        return self.select.memory_of(keep, (text.length - 1,), text.states[None], torch.tensor([False]))


class _Pooled(AvgPool):
    """AvgPool on a model as it is, with such adapters as it has."""

    trains_model = False


class _Kept(hf.Keeper):
    """Keeps all keys and values of a pass over one row, the queries of a pass without scores, and else the scores.

    Scores that read the text again, or depend on the number of tokens that are kept, are left out.
    """

    def __init__(self, frequencies: Callable[[int], Tensor | None], scores: Mapping[str, Score]) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.made = {by: one for by, one in scores.items() if not (one.reads_again or isinstance(one, Even))}
        self.scores: dict[str, list[Tensor]] = {by: [] for by in self.made}
        self.windows: list[int | None] = []
        self.queries: list[tuple[Tensor, float]] = []

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Keeps them, layer after layer."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.keep(layer_idx, key.clone(), value.clone())
        self.windows.append(window)
        self.queries.append((query[0].clone(), scale) if not self.made else (query[0, :, :0], scale))
        heads = Heads(layer_idx, query[0], key[0], value[0], scale, self.frequencies(layer_idx), 0)
        for by, score in self.made.items():
            self.scores[by].append(query.new_zeros(0) if window is not None else score(heads))
