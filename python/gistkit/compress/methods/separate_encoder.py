"""SeparateEncoder: another model reads the segments of a text, and a projector makes embeddings for a frozen reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, rms_norm
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.common.checks import padded, placed
from gistkit.compress import files, texts
from gistkit.compress.adapters import freeze_base
from gistkit.compress.compressor import Compressor
from gistkit.compress.config import RatioConfig, draw_like, matched_to, register, setting
from gistkit.compress.memory import Memory
from gistkit.compress.methods.icae import ENCODER, ChunkCompressor
from gistkit.compress.model import SharedModel
from gistkit.compress.tokens import Rows, batches, room
from gistkit.hf.lora import Maps
from gistkit.layouts.positions import upl

# Where a memory token comes from: hidden states of windows of a segment, or of learned tokens after it.
POOLS = ("means", "tokens")


@register("separate_encoder")
@dataclass(frozen=True, kw_only=True)
class SeparateEncoderConfig(RatioConfig):
    """A second model as the encoder (ARC-Encoder, CompLLM, PISCO, xRAG), beside the arguments of `RatioConfig`.

    Args:
        encoder: the model that reads contexts: a transformers causal language model, or its folder or hub name. None:
            the model itself, with an adapter that is used only for encoding, as in CompLLM.
        segment: context tokens that are encoded together, without other segments; n tokens give ceil(n / ratio) memory
            tokens.
        pool: "means", of windows of the encoder's hidden states, as in ARC-Encoder, or "tokens", the hidden states of
            learned tokens after the segment, as in CompLLM and PISCO.
        layout: position IDs of the memory in the reader: "epl", spread over the segment, or "dpl", consecutive, as in
            the papers.
        lora: rank of a PEFT LoRA on the encoder's linear maps (alpha is twice the rank), or a peft.LoraConfig. None:
            the encoder's own weights train. The reader is always frozen.
        embedding_lora, train_norms: as in `Config`, of the encoder.
    """

    carrier: ClassVar[str] = "embedding"
    maps: ClassVar[Maps] = "all"

    losses: Iterable[str] | Mapping[str, float] = setting(("ae", "lm"), in_memory=False)
    ratio: int = setting(4, least=1, in_memory=False)
    encoder: PreTrainedModel | str | None = setting(None, in_memory=False)
    segment: int = setting(128, least=1)
    pool: str = setting("means", among=POOLS, in_memory=False)
    layout: str = setting("epl", among=("dpl", "epl"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.encoder, nn.Module | str | None):
            raise TypeError(f"encoder: expected a model or its name, got {type(self.encoder).__name__}")
        if self.encoder is None and self.lora is None:
            raise ValueError(
                "lora: expected a rank if the model itself encodes, because the reader is frozen, got None"
            )

    @property
    def roles(self) -> tuple[str, ...]:
        return (ENCODER,)

    @property
    def settings(self) -> dict[str, Any]:
        encoder = self.encoder
        name = hf.identity(encoder)["name"] if isinstance(encoder, nn.Module) else encoder
        return super().settings | {"encoder": name}

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        encoder: Any = self.encoder
        own = embed if encoder is None or isinstance(encoder, str) else encoder.get_input_embeddings()
        return {
            "projector": Projector(own.weight.shape[1], embed),
            "memory_embeddings": draw_like(own, 1) if self.pool == "tokens" else None,
            "task_embeddings": nn.ParameterDict({task: draw_like(embed, 1) for task in ("ae", "lm")}),
        }


class Projector(nn.Module):
    """Hidden states of the encoder as embeddings of the reader: two layers, at the spread and mean of its tokens'.

    Args:
        width: of the encoder.
        embed: the reader's input embedding.
    """

    def __init__(self, width: int, embed: nn.Embedding) -> None:
        super().__init__()
        size, device = embed.weight.shape[1], embed.weight.device
        self.first = nn.Linear(width, size).to(device)
        self.second = nn.Linear(size, size).to(device)
        self.gain, self.shift = matched_to(embed)

    def forward(self, states: Tensor) -> Tensor:
        """[..., d] of [..., width]."""
        out = self.second(gelu(self.first(states.to(self.first.weight.dtype))))
        return rms_norm(out, self.gain.shape) * self.gain + self.shift


class SeparateEncoder(ChunkCompressor, config=SeparateEncoderConfig):
    """A second model encodes and the model reads; arguments are those of `SeparateEncoderConfig`.

    Contexts are token ids of the reader. If the encoder has another tokenizer, each segment is decoded to text and
    tokenized again; the encoder does not see a character that is split between two segments.
    """

    encoder: PreTrainedModel | None
    projector: Projector

    def install(self) -> None:
        model, options = self.model, self.options
        encoder = files.load_encoder(options.encoder, model) if isinstance(options.encoder, str) else options.encoder
        # A compressor whose encoder is the model itself has one copy of it.
        if encoder is not None and encoder is not model:
            self.encoder = encoder
        self.options = replace(options, encoder=None if encoder is model else encoder)
        self._encoder_lm = self.lm if self.encoder is None else _shared(self.encoder)
        self._encoder_tokenizer: Any = None
        # Whether a folder's settings, which may be anybody's, chose the encoder.
        self.named_by_folder = False
        Compressor.install(self)
        if self.encoder is not None:
            freeze_base(model)
            self.encoder.train(model.training)

    @property
    def encoder_lm(self) -> SharedModel:
        return self._encoder_lm

    encoder_tokenizer = property(texts.encoder_tokenizer, texts.set_encoder_tokenizer)

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor | None]:
        """The segments of all rows, those of similar lengths in one pass."""
        self.encoder_lm.refuse_foreign_checkpointing()
        spans = [_spans(length, self.options.segment) for length in rows.lengths]
        parts = [row[start:end] for row, own in zip(rows.lists(), spans, strict=True) for start, end in own]
        counts = [-(-len(part) // self.chunk) for part in parts]
        ids = texts.encoder_ids(self, parts)
        # Models of one tokenizer may have embeddings of different lengths.
        if (largest := max(map(max, ids))) >= self.encoder_lm.vocabulary:
            raise ValueError(
                f"encoder: expected one that embeds all tokens of the contexts, got a vocabulary of "
                f"{self.encoder_lm.vocabulary} and token {largest}"
            )
        made: list[Tensor] = [torch.empty(0)] * len(parts)
        for batch in self._batches([*zip(map(len, ids), counts, strict=True)]):
            found = self._pass([ids[index] for index in batch], [counts[index] for index in batch])
            for index, embeddings in zip(batch, found, strict=True):
                made[index] = embeddings[: counts[index]]
        lengths = tuple(self.size(length) for length in rows.lengths)
        memory = Memory(
            source=self.source,
            lengths=lengths,
            context_lengths=rows.lengths,
            positions=padded([self._positions(own) for own in spans]),
            starts=rows.lengths if self.layout == "epl" else lengths,
            embeddings=pad_sequence([*torch.cat(made).split(lengths)], batch_first=True),
        )
        return memory, None

    def _batches(self, sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        """Indices of segments of the lengths and memory tokens in `sizes` that are encoded in one pass."""
        # Where RoPE's frequencies depend on the length of a pass, that length is a segment's own.
        kinds: list[tuple[int, int] | None] = [*{*sizes}] if self.encoder_lm.changing_rope else [None]
        for kind in kinds:
            group = [index for index, size in enumerate(sizes) if kind in (None, size)]
            for batch in batches([sizes[index][0] for index in group], room(self.device)):
                yield [group[place] for place in batch]

    def _positions(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Position IDs of a row's memory tokens in the reader."""
        found = [upl(start + 1, end, -(-(end - start) // self.chunk)) for start, end in spans]
        ids = np.concatenate(found)
        return (ids if self.layout == "epl" else np.arange(len(ids))).tolist()  # type: ignore[no-any-return]

    def _pass(self, ids: Sequence[list[int]], counts: Sequence[int]) -> Tensor:
        """A pass over segments: embeddings [B, M, d] of their memory tokens, of which a row has the first `counts`."""
        lm, lengths = self.encoder_lm, [len(part) for part in ids]
        inputs = lm.embedded(ENCODER, padded(ids, device=lm.device))
        windows = [_windows(length, count) for length, count in zip(lengths, counts, strict=True)]
        if self.memory_embeddings is not None:
            # Learned tokens after each segment.
            windows = [
                [(slot, slot + 1) for slot in range(length, length + count)]
                for length, count in zip(lengths, counts, strict=True)
            ]
            width = max(spans[-1][1] for spans in windows)
            is_context = placed([[column < length for column in range(width)] for length in lengths], lm.device)
            inputs = pad(inputs, (0, 0, 0, width - inputs.shape[1]))
            inputs = inputs.where(is_context[..., None], self.memory_embeddings.to(inputs))
        lm.check_positions("segment", inputs.shape[1] - 1)
        states = lm.run(ENCODER, inputs_embeds=inputs, plan=lm.causal_plan(inputs.shape[1])).last_hidden_state
        dtype = self.projector.gain.dtype
        weights = torch.zeros(len(ids), max(counts), inputs.shape[1], dtype=dtype)
        for row, spans in zip(weights, windows, strict=True):
            for mean, (start, end) in zip(row, spans, strict=False):
                mean[start:end] = 1 / (end - start)
        found = weights.to(lm.device) @ states.to(dtype)
        return self.projector(found.to(self.device)).to(self.embed.weight.dtype)  # type: ignore[no-any-return]

    def size(self, context: int, ratio: int | None = None) -> int:
        chunk, (whole, rest) = ratio or self.chunk, divmod(context, self.options.segment)
        return whole * -(-self.options.segment // chunk) - -rest // chunk

    def parts_of(self, memory: Memory, context: int) -> NDArray[np.int64]:
        found = []
        for start, end in _spans(context, self.options.segment):
            windows = _windows(end - start, -(-(end - start) // memory.source.chunk))
            found += [(start + first, start + last) for first, last in windows]
        return np.array(found)


def _shared(encoder: PreTrainedModel) -> SharedModel:
    try:
        return SharedModel(encoder)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("model:", "encoder:", 1)) from error


def _spans(length: int, segment: int) -> list[tuple[int, int]]:
    """[start, end) of the segments of a context."""
    return [(start, min(start + segment, length)) for start in range(0, length, segment)]


def _windows(length: int, count: int) -> list[tuple[int, int]]:
    """[start, end) of `count` windows of a segment, which share a token where it has fewer."""
    edges = [slot * length // count for slot in range(count + 1)]
    return [(start, max(end, start + 1)) for start, end in pairwise(edges)]
