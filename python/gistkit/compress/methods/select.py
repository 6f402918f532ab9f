"""Select: of each layer and key head the keys and values with the highest scores stay. Nothing has to be trained."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gistkit import hf, ops
from gistkit.common.checks import placed
from gistkit.compress.compressor import check_base
from gistkit.compress.config import draw_like, register, setting
from gistkit.compress.matching import QUERIES, References, matched
from gistkit.compress.memory import Memory, last_places
from gistkit.compress.memory_join import join_selected
from gistkit.compress.methods.in_place import TEXT, InPlace, InPlaceConfig
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.scores import SCORES, Heads, Score, description, score_of
from gistkit.compress.scores.kvzip import KVzip, Repetition
from gistkit.compress.tokens import QUESTION, Rows, filled_ids, join_rows, pad
from gistkit.hf.attach import decoder_of, frequencies_of
from gistkit.hf.keep import Layers

if TYPE_CHECKING:
    from peft import LoraConfig


# The role of questions and answers where they have an adapter of their own.
READER = "reader"
# Positions left for what is read behind a text.
ROOM = 128
# How heads share what is kept, with what a title says of it.
SHARES = {"equal": "", "heads": ", shared by heads", "all": ", shared by layers and heads", "pyramid": ", as a pyramid"}


@register("select")
@dataclass(frozen=True, kw_only=True)
class SelectConfig(InPlaceConfig):
    """Keeps some of the context's own keys and values, other ones in each layer and head, by a score.

    Args:
        lora: as in `InPlaceConfig`. By default there is none: the model stays as it is, with such adapters as it has.
        own_reader: what is read after the memory, such as questions and answers, has a second adapter. It can train on
            what is kept, while the one that reads contexts, and thus their memories, stay as they are.
        ratio: tokens of the context, BOS among them, for each that is kept, a whole number >= 1.
        by: the score: a name of `gistkit.compress.scores.SCORES`, a mapping with its "name" and arguments, or a
            `Score`. None: "kvzip", or with a question "snapkv".
        question: what will be asked: keys are kept that it attends to, as it is read behind the text in `ask`'s
            template. Other questions find less. It needs a score that reads it.
        budget: how many tokens of any longer context are kept, in place of a share of them.
        shares: "equal": each head keeps as many. "heads": those of a layer share what they keep, by their scores, and
            each has a fifth of an equal share at least (AdaKV, Feng et al., arXiv 2407.11550). "all": the heads of all
            layers do, as KVzip's. "pyramid": the heads of a layer keep as many, and lower layers more than upper ones
            (Cai et al., arXiv 2406.02069; PyramidKV with the score "snapkv").
        part: tokens of a longer context that one pass reads. Each part is read by itself, from position 0 on, and keeps
            its share of what the context keeps, at least a token; `join` then moves it behind the parts before. None:
            the trained length, or else what the model's positions have room for, twice as many tokens with KVzip.
        positions: "kept": the text goes on behind the whole context. "closed": kept tokens move together, by rotation
            of their keys, and the text follows them.
        fit: kept keys get biases, and new values, with which they give what all keys give when the model repeats the
            text, see `gistkit.compress.matching`. The text is read again for it, as by KVzip, whatever the score; the
            memory needs the tokenizer. Layers with a sliding window are left as they are. In training a fit counts as a
            constant.
    """

    needs_training: ClassVar[bool] = False
    free: ClassVar[frozenset[str]] = frozenset({"by", "question", "budget", "shares", "part", "positions", "fit"})

    lora: int | LoraConfig | None = setting(None, in_memory=False)
    own_reader: bool = setting(False, before=False, in_memory=False)
    ratio: int = setting(4, least=1, in_memory=False)
    by: str | Mapping[str, Any] | Score | None = None
    question: str | None = setting(None, before=None)
    budget: int | None = setting(None, least=1)
    shares: Literal["equal", "heads", "all", "pyramid"] = setting("equal", among=SHARES, before="equal")
    part: int | None = setting(None, least=1, before=None, in_memory=False)
    positions: Literal["kept", "closed"] = setting("kept", among=("kept", "closed"))
    fit: bool = setting(False, before=False, in_memory=False)

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
        if self.own_reader and self.lora is None:
            raise ValueError("lora: expected a rank or a peft.LoraConfig with own_reader, got None")
        if self.train_ratios and self.budget is not None:
            raise ValueError(f"train_ratios: expected none with the budget {self.budget}, got {self.train_ratios}")

    @property
    def roles(self) -> tuple[str, ...]:
        """The context, and what is read after its memory if that has an adapter of its own."""
        return (TEXT, READER) if self.own_reader else (TEXT,)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Config.settings`."""
        return super().settings | {"by": description(cast(Score, self.by))}

    @property
    def title(self) -> str:
        """What a table calls it."""
        among = SHARES[self.shares]
        aware = "" if self.question is None else ", for a question"
        fitted = ", fitted" if self.fit else ""
        return f"Select {cast(Score, self.by).name} {self.budget or f'{self.ratio}x'}{among}{fitted}{aware}"

    def at(self, ratio: int) -> Self:
        """See `Config.at`; a budget of the compressor's own leaves no ratio."""
        if self.budget is not None:
            raise ValueError(f"ratio: expected none with the compressor's budget {self.budget}, got {ratio}")
        return super().at(ratio)

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        """See `Config.parts`; without an adapter they are the same at each draw."""
        if self.lora is not None or embed.weight.is_meta:
            return super().parts(embed)
        # Nothing has to be trained: weights tell compressors apart, and chance would make others of equal ones.
        generator = torch.Generator(embed.weight.device).manual_seed(0)
        return {"task_embeddings": nn.ParameterDict({"ae": draw_like(embed, 1, generator)})}

    def changed(self, **settings: Any) -> Self:
        """See `Config.changed`; a score that does not read a question becomes the one for questions."""
        if settings.get("question") is not None and not cast(Score, self.by).reads_question:
            settings = {"by": None, **settings}
        return super().changed(**settings)

    def check_model(self, model: nn.Module) -> None:
        """See `Config.check_model`."""
        if self.shares != "equal" and hf.sliding_windows(model):
            raise ValueError(f"shares: expected equal for a model with sliding windows, got {self.shares}")
        if cast(Score, self.by).needs_rope:
            hf.check_rotates(model)
        if self.positions == "closed":
            hf.check_moves(model)
        if self.fit and getattr(model.config, "attn_logit_softcapping", None):
            raise ValueError("fit: expected a model without an attention softcap, got one with it")


class Select(InPlace, config=SelectConfig):
    """Select; arguments are those of `SelectConfig` and `InPlaceConfig`.

    It works with a model as it is; a LoRA adapter may be trained on what is kept (`lora`). In layers with a sliding
    window the last tokens are kept, as text behind the context sees no others there.
    """

    options: SelectConfig

    def __init__(self, model: Any, config: SelectConfig | None = None, **settings: Any) -> None:
        super().__init__(model, config, **settings)
        self._follow()
        if self.options.own_reader:
            self.reader = READER

    def _follow(self) -> None:
        self.score, self.budget = cast(Score, self.options.by), self.options.budget
        self.closed, self.question = self.options.positions == "closed", self.options.question
        self.shares, self.part, self.fit = self.options.shares, self.options.part, self.options.fit

    def changed(self, **settings: Any) -> Self:
        """See `Compressor.changed`."""
        other = super().changed(**settings)
        other.options.check_model(other.model)
        other._follow()
        return other

    def install(self, lora: Mapping[str, LoraConfig] | None, copies: str | None = None, *, norms: bool = False) -> None:
        """As `Compressor.install`; without LoRA the model stays as it is, with a user's adapters."""
        if lora is not None:
            super().install(lora, copies, norms=norms)
        else:
            check_base(self.loss_weights, False)

    def kept(self, length: int) -> int:
        """How many of `length` tokens each head keeps."""
        return min(length, self.budget) if self.budget is not None else max(1, length // self.chunk)

    def size(self, context: int) -> int:
        """See `Compressor.size`."""
        return max(min(context, self.kept(context + 1)), self._parts(context))

    def _parts(self, context: int) -> int:
        """In how many parts a context of this many tokens is read."""
        reach = self.reach
        if reach is None or self.training or self.window is not None or context <= reach or not self._moves:
            return 1
        return -(-context // reach)

    @property
    def reach(self) -> int | None:
        """Tokens of a context that one pass reads, see `part`; None: all."""
        if self.part is not None or self.trained_length is not None:
            return self.part or self.trained_length
        limit = getattr(self.config, "max_position_embeddings", None)
        # KVzip's request, and questions, are read behind the text.
        return limit and max(1, (limit - min(ROOM, limit // 8)) // (2 if self._repeats else 1))

    @property
    def _repeats(self) -> bool:
        """Whether the text is read again."""
        return self.score.reads_again or self.fit

    def compress_rows(self, rows: Rows) -> tuple[Memory, Tensor | None, Rows]:
        """See `Compressor.compress_rows`; rows longer than `reach` are read in parts, and these are joined."""
        if self._parts(max(rows.lengths)) == 1:
            return super().compress_rows(rows)
        memories = []
        for row in rows.lists():
            count, kept = self._parts(len(row)), self.kept(len(row) + 1)
            ends = [len(row) * index // count for index in range(count + 1)]
            shares = [kept * end // len(row) - kept * start // len(row) for start, end in pairwise(ends)]
            if min(shares) < 1:
                shares = [max(1, kept * (index + 1) // count - kept * index // count) for index in range(count)]
            parts = [
                self.encode_rows(pad([row[start:end]], self.device), share)
                for (start, end), share in zip(pairwise(ends), shares, strict=True)
            ]
            memories.append(self.join([memory for memory, _ in parts]))
        return Memory.stack(memories), None, rows

    @property
    def _moves(self) -> bool:
        try:
            hf.check_moves(self.model)
        except TypeError:
            return False
        return True

    def encode_rows(self, rows: Rows, count: int | None = None) -> tuple[Memory, Tensor]:
        """One pass over BOS and contexts, and for some scores passes that read them again.

        Args:
            count: how many tokens each head keeps of a row; None: as `kept` says.
        """
        input_rows = context = self.with_bos(rows)
        lengths = input_rows.lengths
        counts = tuple(self.kept(length) if count is None else min(count, length) for length in lengths)
        asked = [] if self.question is None else filled_ids(QUESTION, "{question}", self.question, self.tokenizer)
        if asked:
            input_rows = join_rows(input_rows, pad([asked] * rows.batch_size, self.device))
        self.lm.check_positions("input_ids", max(input_rows.lengths) - 1)
        kind = Whole if self._repeats or self.shares == "all" else Selection
        depth = self.config.num_hidden_layers
        keep = kind(lengths, counts, self.score, self.closed, self.frequencies, len(asked), self.shares, depth)
        out = self.lm.run(
            TEXT,
            inputs_embeds=self.lm.embedded(TEXT, input_rows.ids),
            plan=self.lm.causal_plan(input_rows.ids.shape[1]),
            keep=keep,
        )
        if isinstance(keep, Whole):
            keep.select(partial(self.repetition, context, keep.layers) if self._repeats else None)
        # A BOS of the context's own is one of its tokens.
        own_bos = torch.tensor(self._begins_with_bos(rows))
        memory = self.memory_of(keep, rows.lengths, out.last_hidden_state, own_bos)
        return memory, out.last_hidden_state[:, :0]

    def memory_of(
        self, keep: Selection, context_lengths: tuple[int, ...], hidden_states: Tensor, own_bos: Tensor
    ) -> Memory:
        """The memory of what a pass has kept.

        Args:
            keep: after the pass.
            context_lengths: tokens of each context.
            hidden_states: [B, n, d], outputs of the pass.
            own_bos: bool [B], which contexts begin with a BOS of their own.
        """
        lengths = tuple(keep.lengths)
        width = max(index.shape[-1] for index in keep.places.values())
        wide = [F.pad(index, (0, width - index.shape[-1]), value=-1) for _, index in sorted(keep.places.items())]
        places = torch.cat(wide, 1).mT.cpu()
        most = tuple((places >= 0).any(-1).sum(-1).tolist())
        starts = most if self.closed else lengths
        memory = Memory(
            source=self.source,
            lengths=most,
            context_lengths=context_lengths,
            positions=(places + 1 + own_bos[:, None, None]).where(places >= 0, 0),
            # Those of the last tokens, which layers with a sliding window keep; other layers see all keys anyway.
            ordinals=last_places(starts, most),
            starts=starts,
            layers=keep.close(),
            last=hidden_states[torch.arange(len(lengths)), placed(lengths, hidden_states.device) - 1],
            key_bias=keep.key_bias(width),
        )
        return memory if keep.shares == "equal" else memory.without_padding()

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """See `Compressor.ordinals`."""
        # A file of an earlier release has them as positions.
        return memory.positions if memory.ordinals is None else memory.ordinals, memory.starts

    def join(self, memories: Sequence[Memory]) -> Memory:
        """See `Compressor.join`: each document was read by itself, and its keys are moved behind those before it."""
        for memory in memories:
            self.context_spans(memory)
        return join_selected(self, memories)

    def context_spans(self, memory: Memory) -> Tensor:
        """The token itself, int64 [B, K, A, 2], as each of A layers and key heads keeps its own tokens."""
        if memory.positions.dim() == 2:
            raise ValueError("memory: expected one that knows its tokens, got one of an earlier release")
        positions = memory.positions if memory.counts is None else memory.in_columns(memory.positions).long()
        return torch.stack([positions - 2, positions - 1], -1).clamp(min=0)

    def key_biases(self, memory: Memory) -> list[Tensor] | None:
        """See `Compressor.key_biases`: those of the fit, unless they are packed with the keys."""
        if memory.fitted is None or memory.counts is not None:
            return None
        return list(memory.fitted.mT.split([heads for heads, _ in self.lm.head_shapes], 1))

    def frequencies(self, layer: int) -> Tensor | None:
        """Those [R/2] of a layer's RoPE; None where gistkit does not know it."""
        inv_freqs = frequencies_of(decoder_of(self.model))
        return None if inv_freqs is None else inv_freqs[layer]

    @torch.no_grad()
    def repetition(self, rows: Rows, layers: Layers, row: int) -> Repeated:
        """What passes that repeat the text of a row find."""
        again = self.score.reads_again
        score: Any = self.score if again else KVzip()
        name = f"by: {score.name}" if again else "fit: it"
        ids = rows.lists()[row]
        alone = slice(row, row + 1), slice(None), slice(len(ids))
        own = [(key[alone].detach(), value[alone].detach()) for key, value in layers]
        parts: list[Repetition] = []
        repetitions = list(score.repetitions(ids, self.tokenizer))
        for part, words in repetitions:
            self.lm.check_positions(f"{name} reads the text twice", len(ids) + len(words) - 1)
            ordinals = np.arange(len(ids)).tobytes()
            reading = ReadingRow(len(ids), b"", ordinals, len(ids), len(ids), (len(words),))
            plan = decoder_plan((reading,), len(ids), (len(words),), True, self.lm.windows, str(self.device))
            keep = Repetition(own, part, score.sinks, QUERIES // len(repetitions) if self.fit else 0)
            inputs = self.lm.embedded(TEXT, placed([words], self.device))
            self.lm.run(TEXT, inputs_embeds=inputs, plan=plan, memory=own, keep=keep)
            parts.append(keep)
        scores = {layer: torch.cat([part.scores[layer] for part in parts], -1) for layer in parts[0].scores}
        for layer_scores in scores.values():
            layer_scores[:, : score.sinks] = torch.inf
        references = {layer: References.together([part.references[layer] for part in parts])
                      for layer in parts[0].references}  # fmt: skip
        return Repeated(scores, references)


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


def pyramid(count: int, length: int, layers: int, window: int = 1, steepness: int = 20) -> list[int]:
    """How many of `length` tokens each head of each layer keeps, `count` on average, lower layers more (PyramidKV).

    Args:
        window: tokens that every layer keeps; if the top layer cannot, all layers keep as many.
        steepness: the part of an equal share that the top layer has, as 1 / steepness; no layer keeps over `length`.
    """
    top = count / steepness
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
    biases = torch.zeros(index.shape, device=index.device)
    changes = value.new_zeros((*index.shape, value.shape[-1]), dtype=torch.promote_types(value.dtype, torch.float32))
    for head, places in enumerate(index):
        kept = places[places >= 0]
        if 0 < len(kept) < value.shape[1]:
            biases[head, : len(kept)], values = matched(references, head, key[head], value[head], kept)
            changes[head, : len(kept)] = values - value[head, kept]
    return biases, changes


def _places(chosen: Sequence[Tensor]) -> Tensor:
    """int64 [B, Hk, K], the places of what is chosen, bool [Hk, n] of each row, ascending, and then -1."""
    width = max(int(row.sum(-1).max()) for row in chosen)
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
        question: tokens of a question behind each row, whose keys are not kept.
        shares: as of `Select`.
        depth: layers of the model, for a pyramid.
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
    ) -> None:
        super().__init__()
        self.question, self.shares, self.depth = question, shares, depth
        self.lengths, self.counts, self.score = lengths, counts, score
        self.closed, self.frequencies = closed, frequencies
        # Of each layer, what was chosen, int64 [B, Hk, K], and -1 behind it in heads with less.
        self.places: dict[int, Tensor] = {}
        # Of each row and fitted layer, biases [Hk, K] of what was chosen, and the changes [Hk, K, Dv] of its values.
        self.fits: list[dict[int, tuple[Tensor, Tensor]]] = []

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Keeps the chosen rows of key and value."""
        inv_freq = self.frequencies(layer_idx)
        if window is not None:
            index = self._last(key)
        else:
            scores = self._scores(layer_idx, query, key, value, scale, inv_freq)
            counts = self._counts(layer_idx)
            index = _places([self._chosen([own], count)[0] for own, count in zip(scores, counts, strict=True)])
        self._take(layer_idx, key, value, index, inv_freq)

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
        return [pyramid(count, length, self.depth, min(window, length // 2))[layer] for count, length in rows]

    def _chosen(self, scores: Sequence[Tensor], count: int) -> Sequence[Tensor]:
        # AdaKV's heads have a fifth of an equal share at least.
        return chosen(scores, count, {"heads": count // 5, "all": 0}.get(self.shares, count))

    def _last(self, key: Tensor) -> Tensor:
        """int64 [B, Hk, K], the last tokens of each row, and then -1."""
        count, length = (torch.tensor(numbers)[:, None, None] for numbers in (self.counts, self.lengths))
        columns = torch.arange(max(self.counts))
        index = (length - count + columns).where(columns < count, -1)
        return index.expand(-1, key.shape[1], -1).to(key.device)

    def choose(
        self,
        layers: Mapping[int, tuple[Tensor, Tensor]],
        found: Callable[[int], Repeated],
        windows: Container[int] = (),
        inv_freqs: Mapping[int, Tensor | None] | None = None,
    ) -> None:
        """Keeps what scores choose of the keys and values that a pass has left, all heads at once.

        Args:
            layers: key and value of each.
            found: scores of a row, and references for which values and biases are fitted. Those of one row are alive
                at a time, as they may take more than its keys and values.
            windows: layers with a sliding window, which keep the last tokens.
            inv_freqs: of each layer's RoPE, to close up positions.
        """
        full = [layer for layer in sorted(layers) if layer not in windows]
        pools = [full] if self.shares == "all" else [[layer] for layer in full]
        stay: dict[int, list[Tensor]] = {layer: [] for layer in full}
        for row in range(len(self.lengths)):
            self.fits.append(self._choose_row(row, layers, found(row), pools, stay))
        for layer, (key, value) in layers.items():
            index = _places(stay[layer]) if layer in stay else self._last(key)
            self._take(layer, key, value, index, (inv_freqs or {}).get(layer))

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
            fits[layer] = _fitted(references, key, value, _places(stay[layer][-1:])[0])
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

    def _take(self, layer_idx: int, key: Tensor, value: Tensor, index: Tensor, inv_freq: Tensor | None) -> None:
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
            moved = ops.rerotate(key.flatten(0, 1)[:, None], delta.flatten(0, 1), inv_freq)
            key = moved[:, 0].unflatten(0, key.shape[:2])
        self.keep(layer_idx, key, value)


class Whole(Selection):
    """Keeps all keys and values until `select` chooses among them; arguments are those of `Selection`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Window and frequencies of each layer.
        self._about: dict[int, tuple[int | None, Tensor | None]] = {}
        # Of each row, those [Hk, n] of layers without a window.
        self.scores: list[dict[int, Tensor]] = [{} for _ in self.lengths]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Keeps key and value whole."""
        inv_freq = self.frequencies(layer_idx)
        self._about.setdefault(layer_idx, (window, None if inv_freq is None else inv_freq.clone()))
        if window is None and not self.score.reads_again:
            for row, own in zip(self.scores, self._scores(layer_idx, query, key, value, scale, inv_freq), strict=True):
                row.setdefault(layer_idx, own)
        self.keep(layer_idx, key, value)

    def select(self, repetition: Callable[[int], Repeated] | None) -> None:
        """Keeps what the scores of the pass choose, or those of a row's repetition, whose references fit it."""

        def found(row: int) -> Repeated:
            again = Repeated(self.scores[row], {}) if repetition is None else repetition(row)
            return again if self.score.reads_again else again._replace(scores=self.scores[row])

        layers, self._layers = self._layers, {}
        windows = {layer for layer, (window, _) in self._about.items() if window is not None}
        inv_freqs = {layer: inv_freq for layer, (_, inv_freq) in self._about.items()}
        self.choose(layers, found, windows, inv_freqs)
