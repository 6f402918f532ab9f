"""Codec: contexts to memories, and memories to hidden states of what reads them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from gistkit.compress.checks import check_count
from gistkit.compress.memory import Memory, Source
from gistkit.compress.plans import Reader, decoder_plan
from gistkit.compress.shared import SharedModel
from gistkit.compress.tokens import Rows, as_rows, pad
from gistkit.layouts import Plan

Task = Literal["ae", "lm", "qa"]
TASKS = ("ae", "lm", "qa")


def draw_like(embed: nn.Embedding, rows: int) -> nn.Parameter:
    """New embeddings [rows, d] with the mean and spread of those of the vocabulary, fp32."""
    table = embed.weight.detach().float() * float(getattr(embed, "embed_scale", 1.0))
    return nn.Parameter(table.mean(0) + table.std() * torch.randn(rows, table.shape[1], device=table.device))


class Codec(SharedModel, ABC):
    """The encoder and decoder passes of a compressor.

    Args:
        model: a transformers causal language model.
        chunk, memory_tokens: every chunk of so many context tokens, and a shorter last one, has so many memory tokens.
        layout: see `Source`.
        reader: the role whose adapter the decoder runs with; None: none.
        window: see `Compressor`.
    """

    method: ClassVar[str]
    carrier: ClassVar[str]

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int,
        memory_tokens: int,
        layout: str,
        reader: str | None = None,
        window: int | None = None,
    ) -> None:
        if window is not None:
            check_count("window", window)
        super().__init__(model)
        self.chunk, self.memory_tokens, self.layout, self.window = chunk, memory_tokens, layout, window
        self.reader = reader

    @abstractmethod
    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """The memory of rows that fit the window, and the hidden states [B, K, d] at their learned memory tokens."""

    @abstractmethod
    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0 or 1, d]: the task token between memory and text; without one `Memory.last` predicts the text."""

    def places(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """Where memory tokens [B, K] and each row's text stand in logical order, by which sliding windows count."""
        return torch.arange(memory.num_tokens).repeat(memory.batch_size, 1), memory.lengths

    @property
    def ratio(self) -> float:
        """Context tokens a memory token stands for, L / M."""
        return self.chunk / self.memory_tokens

    @property
    def shortest(self) -> int:
        """Tokens a context has at least."""
        return -(-self.chunk // self.memory_tokens)

    @property
    def source(self) -> Source:
        """What a memory must share to be readable."""
        heads, head_dim = self.head_shape
        width = 2 * self.config.num_hidden_layers * heads * head_dim
        return Source(self.method, self.carrier, self.layout, self.chunk, self.memory_tokens, self.structure, width)

    def encode(self, input_ids: Any, attention_mask: Any = None) -> Memory:
        """Compresses a batch of contexts in one pass over all their chunks.

        Args:
            input_ids: int64 [B, p], or lists of ids of any lengths, or a tokenizer's output. At least `ratio` tokens a
                row, what one memory token stands for.
            attention_mask: [B, p], 0 on padding at either end of a row; None: no padding, or the tokenizer's mask.
        """
        memory, _, _ = self.compress(self.contexts(input_ids, attention_mask))
        fingerprint, maker = self.fingerprints()
        return replace(memory, fingerprint=fingerprint, maker=maker)

    def decode(
        self,
        memory: Memory,
        task: Task,
        input_ids: Any,
        attention_mask: Any = None,
    ) -> Tensor:
        """Hidden states [B, 1 + T, d] before `input_ids` [B, T] (at the task token, or the memory) and at each of them.

        Args:
            memory: what `encode` returned; where it has a rest, the decoder reads that between task token and text.
            task: "ae" reconstructs the context, "lm" continues it, "qa" answers a question about it.
            input_ids, attention_mask: as in `encode`; rows may be empty.
        """
        return self.read(memory, task, self.rows("input_ids", input_ids, attention_mask))

    def rows(self, name: str, ids: Any, attention_mask: Any = None, shortest: int = 0) -> Rows:
        """Token ids as users have them, checked and padded at the end of rows."""
        return as_rows(name, ids, attention_mask, vocabulary=self.vocabulary, device=self.device, shortest=shortest)

    def contexts(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """`rows` of contexts, at least as long as what one memory token stands for."""
        return self.rows("input_ids", input_ids, attention_mask, shortest=self.shortest)

    def compress(self, rows: Rows) -> tuple[Memory, Tensor, Rows]:
        """The memory, the hidden states [B, K, d] at the memory tokens, and the tokens that were compressed."""
        self.refuse_foreign_checkpointing()
        rows, rest = self.cut(rows)
        memory, hidden = self.encode_rows(rows)
        return replace(memory, rest=rest or memory.rest), hidden, rows

    def cut(self, rows: Rows) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
        """What is compressed of contexts, and the tokens behind the window of each row; () where there are none."""
        if self.window is None or max(rows.lengths) <= self.window:
            return rows, ()
        limits = self.limits(rows, self.window)
        rest = tuple(tuple(row[limit:]) for row, limit in zip(rows.lists(), limits, strict=True))
        lengths = tuple(map(min, rows.lengths, limits))
        return Rows(rows.ids[:, : max(lengths)], lengths), rest

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row a window compresses."""
        return (window,) * rows.batch_size

    def read(self, memory: Memory, task: Task, rows: Rows) -> Tensor:
        """`decode` of checked rows."""
        check_memory(memory)
        check_rows("input_ids", rows, memory)
        rest = pad(memory.rest if task != "ae" else ((),) * memory.batch_size, self.device)
        plan = self.reading_plan(memory, task, (rest, rows))
        inputs = torch.cat([self.task_embedding(task, memory), self.embed(rest.ids), self.embed(rows.ids)], 1)
        tokens, skip = inputs.shape[1], 0
        if memory.embeddings is not None:
            skip = memory.num_tokens
            inputs = torch.cat([memory.embeddings.to(inputs.dtype), inputs], 1)
        hidden = inputs
        if inputs.shape[1]:
            bias = None
            if memory.key_bias is not None and torch.is_grad_enabled():
                # The text's keys have none. Without gradients it is zeros.
                bias = F.pad(memory.key_bias, (0, inputs.shape[1]))[:, None]
            out = self.run(self.reader, inputs_embeds=inputs, plan=plan, memory=memory.layers, key_bias=bias)
            hidden = out.last_hidden_state[:, skip:]
        if tokens == rest.ids.shape[1] + rows.ids.shape[1]:
            hidden = torch.cat([self.last_of(memory)[:, None].to(hidden.dtype), hidden], 1)
        if not rest.ids.shape[1]:
            return hidden
        last = torch.tensor(rest.lengths, device=hidden.device)[:, None, None]
        return torch.cat([hidden.take_along_dim(last, 1), hidden[:, 1 + rest.ids.shape[1] :]], 1)

    def reading_plan(self, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
        """The plan of [memory][task token][text]...; a row each, but none for memory tokens that are cached keys.

        `name` is the argument that says how long the text is.
        """
        if task not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
        self.check_readable(memory)
        self.rows("memory", memory.rest)
        cached = self.carrier == "kv"
        places, behind = self.places(memory)
        tasks = self.task_embedding(task, memory).shape[1]
        readers = tuple(
            Reader(
                memory.lengths[row],
                # Cached keys are rotated already.
                b"" if cached else memory.positions[row].numpy().tobytes(),
                places[row].numpy().tobytes(),
                0 if task == "ae" and memory.source.consistent else memory.starts[row],
                behind[row],
                (tasks, *(text.lengths[row] for text in texts)),
            )
            for row in range(memory.batch_size)
        )
        self.check_positions(name, max(reader.start + sum(reader.text) - 1 for reader in readers))
        widths = (tasks, *(text.ids.shape[1] for text in texts))
        return decoder_plan(readers, memory.num_tokens, widths, cached, self.windows, str(self.device))

    def last_of(self, memory: Memory) -> Tensor:
        """`Memory.last`, which a memory without task token must have."""
        if memory.last is None:
            raise ValueError("memory: expected one with the output that predicts what follows it, got one without")
        return memory.last

    def check_readable(self, memory: Memory) -> None:
        """Refuses a memory of another method, shape or model, or on another device."""
        if memory.source != self.source:
            raise ValueError(f"memory: expected one made with {self.source}, got one made with {memory.source}")
        memory.check_shapes(self.config.num_hidden_layers, self.head_shape, self.embed.embedding_dim)
        if memory.fingerprint is not None and memory.fingerprint != self.fingerprint():
            raise ValueError(
                f"memory: expected one of the base model {self.fingerprint()}, got one of {memory.fingerprint}: "
                "a model of the same shape with other weights"
            )
        if memory.maker is not None and memory.maker != self.own_fingerprint():
            warnings.warn(
                f"memory: expected one of this compressor's own weights, {self.own_fingerprint()}, got one of "
                f"{memory.maker}: another compressor, or this one before it was trained further",
                stacklevel=3,
            )
        if memory.device != self.device:
            raise ValueError(f"memory: expected it on {self.device}, got it on {memory.device}; use memory.to(device)")


def check_memory(memory: object) -> None:
    """Refuses what is no memory."""
    if not isinstance(memory, Memory):
        raise TypeError(f"memory: expected a Memory as encode returns, got {type(memory).__name__}")


def check_rows(name: str, rows: Rows, memory: Memory) -> None:
    """Refuses text with another number of rows than the memory has."""
    if rows.batch_size != memory.batch_size:
        raise ValueError(f"{name}: expected {memory.batch_size} rows as the memory has, got {rows.batch_size}")
