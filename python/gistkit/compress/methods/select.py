"""Select: of each layer and key head the keys and values with the highest scores stay. Nothing has to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gistkit import hf
from gistkit.common.checks import placed
from gistkit.common.text_ids import filled_ids
from gistkit.compress.config import draw_like, register, setting
from gistkit.compress.generation import stop_ids
from gistkit.compress.matching import QUERIES, References
from gistkit.compress.memory import Memory, last_places, ordinals_of
from gistkit.compress.methods.in_place import TEXT, InPlace, InPlaceConfig
from gistkit.compress.parts import equal_ends, moves
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.scores import SCORES, Score, description, score_of
from gistkit.compress.scores.kvzip import KVzip, Repetition
from gistkit.compress.selection import Repeated, Selection
from gistkit.compress.tokens import QUESTION, Rows, join_rows, pad
from gistkit.hf.attach import decoder_of, frequencies_of
from gistkit.hf.keep import Layers

if TYPE_CHECKING:
    from peft import LoraConfig


# The role of questions and answers where they have an adapter of their own.
READER = "reader"
# Tokens of an answer that is drafted to see what it reads.
ANSWER = 32
# Positions left for what is read after a text.
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
            `Score`. None: "kvzip".
        question: what will be asked: keys are kept that it attends to, as it is read after the text in `ask`'s
            template; with "kvzip" also those that the model's answer attends to. Other questions find less. It needs a
            score that reads it.
        budget: how many tokens of any longer context are kept, in place of a share of them.
        shares: "equal": each head keeps as many. "heads": those of a layer share what they keep, by their scores, and
            each has a fifth of an equal share at least (AdaKV, Feng et al., arXiv 2407.11550). "all": the heads of all
            layers do, as KVzip's. "pyramid": the heads of a layer keep as many, and lower layers more than upper ones
            (Cai et al., arXiv 2406.02069; PyramidKV with the score "snapkv"). All keep the bytes of equal shares. In a
            model with sliding windows, layers with a window keep the same part of the tokens that text after the
            context sees there as equal shares keep of the context, the last ones, and layers without share the rest;
            where all have a window nothing is shared.
        part: as in `InPlaceConfig`; each part keeps its share of what the context keeps, at least a token. Without a
            trained length, None is what the model's positions have room for, twice as many tokens with KVzip.
        positions: "kept": the text continues after the whole context. "closed": kept tokens move together, by rotation
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
    positions: Literal["kept", "closed"] = setting("kept", among=("kept", "closed"))
    fit: bool = setting(False, before=False, in_memory=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        question = self.question
        score = score_of("kvzip" if self.by is None else self.by)
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
        return (TEXT, READER) if self.own_reader else (TEXT,)

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"by": description(cast(Score, self.by))}

    @property
    def title(self) -> str:
        among = SHARES[self.shares]
        aware = "" if self.question is None else ", for a question"
        fitted = ", fitted" if self.fit else ""
        return f"Select {cast(Score, self.by).name} {self.budget or f'{self.ratio}x'}{among}{fitted}{aware}"

    def at(self, ratio: int) -> Self:
        """See `Config.at`; a budget of the compressor's own leaves no ratio."""
        if self.budget is not None:
            raise ValueError(f"ratio: expected none with the compressor's budget {self.budget}, got {ratio:g}")
        return super().at(ratio)

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        """See `Config.parts`; without an adapter they are the same at each draw."""
        if self.lora is not None or embed.weight.is_meta:
            return super().parts(embed)
        # Nothing has to be trained: weights tell compressors apart, and chance, or a GPU's other numbers, would make
        # others of equal ones.
        return {"task_embeddings": nn.ParameterDict({"ae": draw_like(embed, 1, torch.Generator().manual_seed(0))})}

    def changed(self, **settings: Any) -> Self:
        """See `Config.changed`; a score that does not read a question becomes the one for questions."""
        if settings.get("question") is not None and not cast(Score, self.by).reads_question:
            settings = {"by": None, **settings}
        return super().changed(**settings)

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if len(devices := sorted({str(weight.device) for weight in model.parameters()})) > 1:
            raise ValueError(f"model: expected all weights on one device for a selection, got {', '.join(devices)}")
        if cast(Score, self.by).needs_rope:
            hf.check_rotates(model)
        if self.positions == "closed":
            hf.check_moves(model)
        if self.fit and getattr(cast(Any, model).config.get_text_config(), "attn_logit_softcapping", None):
            raise ValueError("fit: expected a model without an attention softcap, got one with it")


class Select(InPlace, config=SelectConfig):
    """Select; arguments are those of `SelectConfig` and `InPlaceConfig`.

    It works with a model as it is; a LoRA adapter may be trained on what is kept (`lora`). In layers with a sliding
    window the last tokens are kept, as text after the context sees no others there.
    """

    options: SelectConfig
    trains_model = False

    def install(self) -> None:
        super().install()
        if self.options.own_reader:
            self.reader = READER

    @property
    def closed(self) -> bool:
        """Whether kept tokens move together."""
        return self.options.positions == "closed"

    @property
    def score(self) -> Score:
        """What decides which keys are kept."""
        return cast(Score, self.options.by)

    def kept(self, length: int, ratio: int | None = None) -> int:
        """How many of `length` tokens each head keeps."""
        return min(length, self.budget) if self.budget is not None else max(1, length // (ratio or self.chunk))

    def size(self, context: int, ratio: int | None = None) -> int:
        return max(min(context, self.kept(context + 1, ratio)), len(equal_ends(context, self.reach)))

    @property
    def reach(self) -> int | None:
        found, limit = super().reach, getattr(self.config, "max_position_embeddings", None)
        if found is not None or self.options.part == 0 or self.training or limit is None or not moves(self.model):
            return found
        # KVzip's request, and questions with a draft of an answer, are read after the text.
        behind = max(min(ROOM, limit // 8), len(self._asked) + ANSWER if self._asked else 0)
        return max(1, (limit - behind) // (2 if self._repeats else 1))

    def part_ends(self, row: Sequence[int]) -> list[int]:
        bos = int(row[0] == self.bos_token)
        return [bos + end for end in equal_ends(len(row) - bos, self.reach)]

    @property
    def _asked(self) -> list[int]:
        """The token ids of `question`, as it is read after the text."""
        # A tokenizer keeps whether names of control tokens are text, and threads share it.
        with self.lm.turn():
            return [] if self.question is None else filled_ids(QUESTION, "{question}", self.question, self.tokenizer)

    @property
    def _repeats(self) -> bool:
        """Whether the text is read again."""
        return self.score.reads_again or self.fit

    def encode_parts(self, parts: Sequence[Sequence[int]]) -> list[Memory]:
        ends, count = [0, *accumulate(map(len, parts))], len(parts)
        length, own_bos = ends[-1], int(parts[0][0] == self.bos_token)
        kept = self.kept(length + 1 - own_bos)
        shares = [kept * end // length - kept * start // length for start, end in pairwise(ends)]
        if min(shares) < 1:
            shares = [max(1, kept * (index + 1) // count - kept * index // count) for index in range(count)]
        # The first tokens of all parts would leave little for others, or nothing.
        sinks = [None] if count == 1 else [max(1, shares[0] // 4), *[0] * (count - 1)]
        found = zip(parts, shares, sinks, strict=True)
        return [self.encode_rows(pad([part], self.device), share, first)[0] for part, share, first in found]

    def encode_rows(self, rows: Rows, count: int | None = None, sinks: int | None = None) -> tuple[Memory, Tensor]:
        """One pass over BOS and contexts, and for some scores passes that read them again.

        Args:
            count: how many tokens each head keeps of a row; None: as `kept` says.
            sinks: how many of the score's first tokens are kept whatever their scores; None: all.
        """
        input_rows = context = self.with_bos(rows)
        lengths = input_rows.lengths
        counts = tuple(self.kept(length) if count is None else min(count, length) for length in lengths)
        asked = self._asked
        behind = [] if self.score.reads_again else asked
        if behind:
            input_rows = join_rows(input_rows, pad([behind] * rows.batch_size, self.device))
        self.lm.check_positions("input_ids", max(input_rows.lengths) - 1)
        # What a layer keeps depends on the others.
        together = self.shares == "all" or (self.shares != "equal" and bool(self.lm.windows))
        keep = Selection(
            lengths, counts, self.score, self.closed, self.frequencies, len(behind), self.shares,
            self.config.num_hidden_layers, sinks, whole=self._repeats or together,
        )  # fmt: skip
        out = self.lm.run(
            TEXT,
            inputs_embeds=self.lm.embedded(TEXT, input_rows.ids),
            plan=self.lm.causal_plan(input_rows.ids.shape[1]),
            keep=keep,
            # The text's own, also where a question behind it is read too.
            rope_length=max(lengths),
        )
        if keep.whole:
            again = partial(self.repetition, context, keep.layers, asked=asked)
            keep.select(again if self._repeats else None)
        # A BOS of the context's own is one of its tokens.
        own_bos = torch.tensor(self._begins_with_bos(rows))
        memory = self.memory_of(keep, rows.lengths, out.last_hidden_state, own_bos)
        return memory, out.last_hidden_state[:, :0]

    def memory_of(
        self, keep: Selection, context_lengths: tuple[int, ...], hidden_states: Tensor, own_bos: Tensor
    ) -> Memory:
        """The memory of what a pass with these outputs [B, n, d] has kept.

        Args:
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
            ordinals=F.pad(last_places(starts, keep.last), (0, width - max(keep.last))),
            starts=starts,
            layers=keep.close(),
            last=hidden_states[torch.arange(len(lengths)), placed(lengths, hidden_states.device) - 1],
            key_bias=keep.key_bias(width),
        )
        return memory if keep.shares == "equal" else memory.without_padding()

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        return ordinals_of(memory), memory.starts

    # Each document keeps its own BOS.
    shared_columns = 0

    def positions_behind(self, first: Memory, second: Memory, delta: Tensor) -> Tensor:
        """They are places in the context, not position IDs."""
        positions, context = second.positions, torch.tensor(first.context_lengths)[:, None, None]
        if second.counts is not None:
            context = context.flatten().int().repeat_interleave(torch.cat(second.counts, 1).sum(1))
        return torch.where(positions > 1, positions + context, positions)

    def check_documents(self, memories: Sequence[Memory]) -> None:
        hf.check_moves(self.model)
        for memory in memories:
            self.context_spans(memory)

    def context_spans(self, memory: Memory) -> Tensor:
        """The token itself, int64 [B, K, A, 2], as each of A layers and key heads keeps its own tokens."""
        positions = memory.positions if memory.counts is None else memory.in_columns(memory.positions).long()
        if positions.dim() != 3:
            raise ValueError(
                f"memory: expected positions [rows, tokens, heads of all layers], got shape {tuple(positions.shape)}"
            )
        return torch.stack([positions - 2, positions - 1], -1).clamp(min=0)

    def kept_tokens(self, memory: Memory) -> list[int]:
        """See `Compressor.kept_tokens`: BOS and those that most heads keep, as many as a head keeps."""
        start, end = self.context_spans(memory)[0].flatten(0, 1).unbind(-1)
        # Empty spans are those of BOS and of heads that keep less.
        heads = (start[end > start] + 1).bincount(minlength=1)
        heads[0] = heads.max() + 1
        return heads.sort(descending=True, stable=True).indices[: memory.sizes[0]].sort().values.tolist()  # type: ignore[no-any-return]

    def key_biases(self, memory: Memory) -> list[Tensor] | None:
        """See `Compressor.key_biases`: those of the fit, unless they are packed with the keys."""
        if memory.key_bias is None or memory.counts is not None:
            return None
        return list(memory.key_bias.mT.split([heads for heads, _ in self.lm.head_shapes], 1))

    def frequencies(self, layer: int) -> Tensor | None:
        """Those [R/2] of a layer's RoPE; None where gistkit does not know it."""
        inv_freqs = frequencies_of(decoder_of(self.model))
        return None if inv_freqs is None else inv_freqs[layer]

    @torch.no_grad()
    def repetition(self, rows: Rows, layers: Layers, row: int, asked: Sequence[int] = ()) -> Repeated:
        """What passes find that repeat the text of a row, or answer what is asked about it."""
        ids = rows.lists()[row]
        alone = slice(row, row + 1), slice(None), slice(len(ids))
        own = [(key[alone].detach(), value[alone].detach()) for key, value in layers]
        score: Any = self.score if self.score.reads_again else KVzip()
        of_question, found = bool(asked) and self.score.reads_again, Repeated({}, {})
        if self.fit or not of_question:
            with self.lm.turn():
                passes = list(score.repetitions(ids, self.tokenizer))
            found = self.read_again(own, passes)
        if of_question:
            answer = slice(0, len(ids)), self.answered(own, asked)
            name = "question: it and its answer are read after the text"
            found = found._replace(scores=self.read_again(own, [answer], self.reader, name).scores)
        return found

    def answered(self, layers: Layers, asked: Sequence[int]) -> list[int]:
        """A question and what the model answers with a whole text: one line, without the token that ends it."""
        length = layers[0][0].shape[2]
        places = torch.arange(length)[None]
        whole = Memory(
            source=self.source,
            lengths=(length,),
            context_lengths=(length,),
            positions=places,
            ordinals=places,
            starts=(length,),
            layers=tuple(layers),
            # Of what follows the text at once, which is the question.
            last=layers[0][0].new_zeros(1, self.lm.width),
        )
        limit = getattr(self.config, "max_position_embeddings", None)
        room = ANSWER if limit is None else min(ANSWER, limit - length - len(asked))
        if room < 1:
            return [*asked]
        ends = {*stop_ids(self.lm, None), self.tokenizer.eos_token_id} - {None}
        options: Any = {"stop_tokens": ends, "stop_strings": ["\n"], "tokenizer": self.tokenizer}
        answer = self.generate(whole, [list(asked)], task="qa", max_new_tokens=room, **options)
        return [*asked, *answer[0, :-1].tolist()]

    @torch.no_grad()
    def read_again(
        self,
        own: Layers,
        passes: Sequence[tuple[slice, list[int]]],
        role: str | None = TEXT,
        name: str | None = None,
    ) -> Repeated:
        """What passes over a text's keys and values [1, Hk, n, D] find.

        Args:
            passes: of each the part of the text that it scores, and the token ids that are read.
            name: the setting that needs them, and why, for a message.
        """
        length = own[0][0].shape[2]
        needs = f"by: {self.score.name}" if self.score.reads_again else "fit: it"
        name = name or f"{needs} reads the text twice"
        score: Any = self.score if self.score.reads_again else KVzip()
        parts: list[Repetition] = []
        for part, words in passes:
            self.lm.check_positions(name, length + len(words) - 1)
            ordinals = np.arange(length).tobytes()
            reading = ReadingRow(length, b"", ordinals, length, length, (len(words),))
            plan = decoder_plan((reading,), length, (len(words),), True, self.lm.windows, str(self.device))
            keep = Repetition(own, part, score.sinks, QUERIES // len(passes) if self.fit else 0)
            inputs = self.lm.embedded(role, placed([words], self.device))
            self.lm.run(role, inputs_embeds=inputs, plan=plan, memory=own, keep=keep, rope_length=length)
            parts.append(keep)
        scores = {layer: torch.cat([part.scores[layer] for part in parts], -1) for layer in parts[0].scores}
        references = {layer: References.together([part.references[layer] for part in parts])
                      for layer in parts[0].references}  # fmt: skip
        return Repeated(scores, references)
