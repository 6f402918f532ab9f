"""Select: of each layer and key head the keys and values with the highest scores stay. Nothing has to be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from gistkit import hf, ops
from gistkit.common.checks import placed
from gistkit.compress.compressor import check_base
from gistkit.compress.config import register, setting
from gistkit.compress.memory import Memory
from gistkit.compress.memory_join import join_selected
from gistkit.compress.methods.in_place import TEXT, InPlace, InPlaceConfig
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.scores import SCORES, Heads, Score, description, score_of
from gistkit.compress.scores.kvzip import Repetition
from gistkit.compress.tokens import QUESTION, Rows, filled_ids, join_rows, pad
from gistkit.hf.attach import decoder_of, frequencies_of
from gistkit.hf.keep import Layers

if TYPE_CHECKING:
    from peft import LoraConfig


@register("select")
@dataclass(frozen=True, kw_only=True)
class SelectConfig(InPlaceConfig):
    """Keeps some of the context's own keys and values, other ones in each layer and head, by a score.

    Args:
        lora: as in `InPlaceConfig`. By default there is none: the model stays as it is, with such adapters as it has.
        ratio: tokens of the context, BOS among them, for each that is kept, a whole number >= 1.
        by: the score: a name of `gistkit.compress.scores.SCORES`, a mapping with its "name" and arguments, or a
            `Score`. None: "kvzip", or with a question "snapkv".
        question: what will be asked: keys are kept that it attends to, as it is read behind the text in `ask`'s
            template. Other questions find less. It needs a score that reads it.
        budget: how many tokens of any longer context are kept, in place of a share of them.
        positions: "kept": the text goes on behind the whole context. "closed": kept tokens move together, by rotation
            of their keys, and the text follows them.
    """

    needs_training: ClassVar[bool] = False

    lora: int | LoraConfig | None = setting(None, in_memory=False)
    ratio: int = setting(4, least=1, in_memory=False)
    by: str | Mapping[str, Any] | Score | None = None
    question: str | None = setting(None, before=None)
    budget: int | None = setting(None, least=1)
    positions: Literal["kept", "closed"] = setting("kept", among=("kept", "closed"))

    def __post_init__(self) -> None:
        super().__post_init__()
        question = self.question
        score = score_of(("kvzip" if question is None else "snapkv") if self.by is None else self.by)
        if question is not None and (not isinstance(question, str) or not question.strip()):
            raise ValueError(f"question: expected a text, got {question!r}")
        if question is not None and not score.reads_question:
            names = ", ".join(name for name, kind in SCORES.items() if kind.reads_question)
            raise ValueError(f"question: expected by {names}, which reads it, got by {score.name}")
        self._set("by", score)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Config.settings`."""
        return super().settings | {"by": description(cast(Score, self.by))}

    @property
    def title(self) -> str:
        """What a table calls it."""
        aware = "" if self.question is None else ", for a question"
        return f"Select {cast(Score, self.by).name} {self.budget or f'{self.ratio}x'}{aware}"

    def check_model(self, model: nn.Module) -> None:
        """See `Config.check_model`."""
        if cast(Score, self.by).needs_rope:
            hf.check_rotates(model)
        if self.positions == "closed":
            hf.check_moves(model)


class Select(InPlace, config=SelectConfig):
    """Select; arguments are those of `SelectConfig` and `InPlaceConfig`.

    It works with a model as it is; a LoRA adapter may be trained on what is kept (`lora`). In layers with a sliding
    window the last tokens are kept, as text behind the context sees no others there.
    """

    options: SelectConfig

    def __init__(self, model: Any, config: SelectConfig | None = None, **settings: Any) -> None:
        super().__init__(model, config, **settings)
        self.score, self.budget = cast(Score, self.options.by), self.options.budget
        self.closed, self.question = self.options.positions == "closed", self.options.question

    def install(self, lora: Mapping[str, LoraConfig] | None, copies: str | None = None, *, norms: bool = False) -> None:
        """As `Compressor.install`; without LoRA the model stays as it is, with a user's adapters."""
        if lora is not None:
            super().install(lora, copies, norms=norms)
        else:
            check_base(self.loss_weights, False)

    def kept(self, length: int) -> int:
        """How many of `length` tokens each head keeps."""
        return min(length, self.budget) if self.budget is not None else max(1, length // self.chunk)

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """One pass over BOS and contexts, and for some scores passes that read them again."""
        input_rows = self.with_bos(rows)
        lengths, counts = input_rows.lengths, tuple(map(self.kept, input_rows.lengths))
        asked = [] if self.question is None else filled_ids(QUESTION, "{question}", self.question, self.tokenizer)
        if asked:
            input_rows = join_rows(input_rows, pad([asked] * rows.batch_size, self.device))
        self.lm.check_positions("input_ids", max(input_rows.lengths) - 1)
        kind = Whole if self.score.reads_again else Selection
        keep = kind(lengths, counts, self.score, self.closed, self.frequencies, len(asked))
        out = self.lm.run(
            TEXT,
            inputs_embeds=self.lm.embedded(TEXT, input_rows.ids),
            plan=self.lm.causal_plan(input_rows.ids.shape[1]),
            keep=keep,
        )
        if isinstance(keep, Whole):
            keep.select(self.repetition(input_rows, keep.layers))
        columns = torch.arange(max(counts))
        count = torch.tensor(counts)[:, None]
        first = 0 if self.closed else torch.tensor(lengths)[:, None] - count
        hidden_states = out.last_hidden_state
        places = torch.cat([keep.places[layer] for layer in sorted(keep.places)], 1).mT.cpu()
        # A BOS of the context's own is one of its tokens.
        own_bos = torch.tensor(self._begins_with_bos(rows))[:, None, None]
        memory = Memory(
            source=self.source,
            lengths=counts,
            context_lengths=rows.lengths,
            positions=(places + own_bos).where((columns < count)[..., None], 0),
            # Those of the last tokens, which layers with a sliding window keep; other layers see all keys anyway.
            ordinals=(first + columns).where(columns < count, 0),
            starts=counts if self.closed else lengths,
            layers=keep.close(),
            last=hidden_states[torch.arange(rows.batch_size), placed(lengths, self.device) - 1],
        )
        return memory, hidden_states[:, :0]

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """See `Compressor.ordinals`."""
        # A file of an earlier release has them as positions.
        return memory.positions if memory.ordinals is None else memory.ordinals, memory.starts

    def join(self, memories: Sequence[Memory]) -> Memory:
        """See `Compressor.join`: each document was read by itself, and its keys are moved behind those before it."""
        for memory in memories:
            self.stands_for(memory)
        return join_selected(self, memories)

    def stands_for(self, memory: Memory) -> Tensor:
        """The token itself, int64 [B, K, A, 2], as each of A layers and key heads keeps its own tokens."""
        if memory.positions.dim() == 2:
            raise ValueError("memory: expected one that knows its tokens, got one of an earlier release")
        return torch.stack([(memory.positions - 1).clamp(min=0), memory.positions], -1)

    def frequencies(self, layer: int) -> Tensor | None:
        """Those [R/2] of a layer's RoPE; None where gistkit does not know it."""
        inv_freqs = frequencies_of(decoder_of(self.model))
        return None if inv_freqs is None else inv_freqs[layer]

    @torch.no_grad()
    def repetition(self, rows: Rows, layers: Layers) -> list[dict[int, Tensor]]:
        """For each row the scores [Hk, n] of each layer's keys, from passes that repeat the text."""
        score: Any = self.score
        found = []
        for row, ids in enumerate(rows.lists()):
            alone = slice(row, row + 1), slice(None), slice(len(ids))
            own = [(key[alone].detach(), value[alone].detach()) for key, value in layers]
            parts: list[dict[int, Tensor]] = []
            for part, words in score.repetitions(ids, self.tokenizer):
                self.lm.check_positions(f"by: {score.name} reads the text twice", len(ids) + len(words) - 1)
                ordinals = np.arange(len(ids)).tobytes()
                reading = ReadingRow(len(ids), b"", ordinals, len(ids), len(ids), (len(words),))
                plan = decoder_plan((reading,), len(ids), (len(words),), True, self.lm.windows, str(self.device))
                keep = Repetition(own, part, score.sinks)
                inputs = self.lm.embedded(TEXT, placed([words], self.device))
                self.lm.run(TEXT, inputs_embeds=inputs, plan=plan, memory=own, keep=keep)
                parts.append(keep.scores)
            scores = {layer: torch.cat([part[layer] for part in parts], -1) for layer in parts[0]}
            for layer_scores in scores.values():
                layer_scores[:, : score.sinks] = torch.inf
            found.append(scores)
        return found


class Selection(hf.Keeper):
    """Keeps of each layer and key head the keys with the highest scores, in their order.

    Args:
        lengths: tokens of each row.
        counts: how many of them are kept.
        score: of the keys of one row.
        closed: keys are rotated to positions 0, 1, ..
        frequencies: of the RoPE of the layer of an index, during the pass; None where gistkit does not know it.
        question: tokens of a question behind each row, whose keys are not kept.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        score: Score,
        closed: bool,
        frequencies: Callable[[int], Tensor | None],
        question: int = 0,
    ) -> None:
        super().__init__()
        self.question = question
        self.lengths, self.counts, self.score = lengths, counts, score
        self.closed, self.frequencies = closed, frequencies
        # Of each layer, what was chosen, int64 [B, Hk, K].
        self.places: dict[int, Tensor] = {}

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Keeps the chosen rows of key and value."""
        inv_freq = self.frequencies(layer_idx)
        if window is not None:
            index = self._last(key)
        else:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            with torch.no_grad():
                scores = []
                for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
                    q, k, v = (tensor[row, :, : length + self.question] for tensor in (query, key, value))
                    heads = Heads(layer_idx, q, k, v, scale, inv_freq, count, self.question)
                    scores.append(self.score(heads)[:, :length])
            index = self._highest(scores)
        self._take(layer_idx, key, value, index, inv_freq)

    def _last(self, key: Tensor) -> Tensor:
        """int64 [B, Hk, K], the last tokens of each row."""
        count, length = (torch.tensor(numbers)[:, None, None] for numbers in (self.counts, self.lengths))
        columns = torch.arange(max(self.counts))
        index = (length - count + columns).where(columns < count, 0)
        return index.expand(-1, key.shape[1], -1).to(key.device)

    def _highest(self, scores: Sequence[Tensor]) -> Tensor:
        """int64 [B, Hk, K], the tokens with the highest scores of each row, ascending; of equal ones the first."""
        index = scores[0].new_zeros((len(scores), len(scores[0]), max(self.counts)), dtype=torch.int64)
        for row, (own, count) in enumerate(zip(scores, self.counts, strict=True)):
            best = torch.sort(own, dim=-1, descending=True, stable=True).indices[:, :count]
            index[row, :, :count] = best.sort(-1).values
        return index

    def _take(self, layer_idx: int, key: Tensor, value: Tensor, index: Tensor, inv_freq: Tensor | None) -> None:
        self.places.setdefault(layer_idx, index)
        key, value = (tensor.take_along_dim(index[..., None], 2) for tensor in (key, value))
        if self.closed and inv_freq is not None:
            delta = torch.arange(index.shape[-1], device=index.device) - index
            moved = ops.rerotate(key.flatten(0, 1)[:, None], delta.flatten(0, 1), inv_freq)
            key = moved[:, 0].unflatten(0, key.shape[:2])
        self.keep(layer_idx, key, value)


class Whole(Selection):
    """Keeps all keys and values until `select` chooses among them; arguments are those of `Selection`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Window and frequencies of each layer.
        self._about: dict[int, tuple[int | None, Tensor | None]] = {}

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Keeps key and value whole."""
        inv_freq = self.frequencies(layer_idx)
        self._about.setdefault(layer_idx, (window, None if inv_freq is None else inv_freq.clone()))
        self.keep(layer_idx, key, value)

    def select(self, scores: Sequence[Mapping[int, Tensor]]) -> None:
        """Keeps what the scores [Hk, n] of each row and layer choose."""
        layers, self._layers = self._layers, {}
        for layer, (key, value) in layers.items():
            window, inv_freq = self._about[layer]
            index = self._last(key) if window is not None else self._highest([row[layer] for row in scores])
            self._take(layer, key, value, index, inv_freq)
