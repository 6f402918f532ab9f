"""Method: what a method of compression says of itself; a new one overrides what differs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gistkit.compress.config import Config
from gistkit.compress.losses import segment_targets
from gistkit.compress.memory import Memory, Task
from gistkit.compress.plans import Places
from gistkit.compress.tokens import Rows


class Method(ABC):
    """A method: its config, and how its memories are made, placed and read.

    A compressor has the settings and all else that its config says, such as `settings`, `title`, `chunk`,
    `memory_tokens`, `window` and the fields of the method.

    A method is a subclass of `Compressor`, `class Name(..., config=NameConfig)`, see `gistkit.compress.config`.
    """

    config_class: ClassVar[type[Config]]
    method: ClassVar[str]
    carrier: ClassVar[str] = "kv"
    needs_training: ClassVar[bool] = True
    """Whether a memory is noise to a model before the compressor was trained."""
    encoder_predicts_first: ClassVar[bool] = False
    """Whether `Memory.last`, which has read the whole context, predicts a continuation's first token."""
    adapts_some: ClassVar[bool] = False
    """Whether its one adapter is for some tokens of a pass, and the others have none."""
    trains_model: ClassVar[bool] = True
    """Whether without LoRA the model's own weights train."""
    reader: str | None = None
    """The role whose adapter the decoder runs with; None: no adapter."""
    options: Config

    def __init_subclass__(cls, config: type[Config] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if config is not None:
            config.compressor, cls.config_class = cls, config
            cls.method, cls.carrier, cls.needs_training = config.method, config.carrier, config.needs_training
            cls.__signature__ = config.signature()  # type: ignore[attr-defined]

    @property
    def ratio(self) -> float:
        """Context tokens per memory token, L / M."""
        return self.options.chunk / self.options.memory_tokens

    @property
    def loss_weights(self) -> dict[str, float]:
        """{name: weight} of the losses that `forward` returns."""
        return cast("dict[str, float]", self.options.losses)

    def set_window(self, window: int | None) -> None:
        """Changes how many tokens of a longer context are compressed; None: all of them.

        Raises:
            ValueError: if the method has no window, or that is out of range.
        """
        if "window" not in self.config_class.names():
            raise ValueError(f"window: expected none for {self.method}, which has no window, got {window}")
        changed: dict[str, Any] = {"window": window}
        self.options = replace(self.options, **changed)

    def at(self, ratio: int) -> Self:
        """This compressor at another ratio: the same weights, and each of the two reads the other's memories.

        Methods in place can, except `NoContext`. They do well what they were trained at, with `train_ratios` or one.
        `window`, `trained_length` and losses are those of the moment: what changes one of the two later leaves the
        other as it is. One with a head of the loss "compression" is trained and saved only at the head's ratio.

        Args:
            ratio: context tokens for each memory token, a whole number >= 1.

        Raises:
            ValueError: for a method whose weights are those of one ratio, as `FiveHundredX`.
        """
        options = self.options.at(ratio)
        if options is self.options:
            return self
        other = copy.copy(self)
        other.options = options
        return other

    def changed(self, **settings: Any) -> Self:
        """This compressor with other settings, those that its weights do not depend on: `config_class.free`.

        It is a copy with the same weights, as that of `at`. In methods in place `part` is one of them. For `Select` all
        but those of adapters, training and tokens are, such as `fit`, `shares` and `question`; with a question, a score
        that does not read it becomes the one that `SelectConfig` takes for it.

        Raises:
            TypeError: for a setting that the weights depend on.
        """
        if taken := sorted(settings.keys() - self.options.free):
            free = ", ".join(sorted(self.options.free))
            expected = f"some of {free}" if free else f"none for {self.method}"
            raise TypeError(f"{taken[0]}: expected {expected}, got {taken[0]}")
        other = copy.copy(self)
        other.options = self.options.changed(**settings)
        other.options.check_model(cast(Any, self).lm.model)
        return other

    def within(self, contexts: Rows, budget: int) -> Self:
        """`at` the least ratio at which every context has at most `budget` memory tokens."""
        rows, _ = self.cut(contexts)
        # Without their BOS.
        lengths = [length - bos for length, bos in zip(rows.lengths, self.limits(rows, 0), strict=True)]
        longest, ratio = max(lengths), None
        if self.options.budget is None and self.options.any_ratio:
            ratio = 1 + bisect_left(range(1, longest), True, key=lambda ratio: self.size(longest, ratio) <= budget)
        if (most := self.size(longest, ratio)) > budget:
            raise ValueError(
                f"budget: expected at least {most}, the memory tokens of contexts of up to {longest} tokens, "
                f"got {budget}"
            )
        return self if ratio is None else self.at(ratio)

    def cut(self, rows: Rows) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
        """The part of contexts that is compressed, and each row's tokens after the window; () if there are none."""
        window = cast(Any, self).window
        if window is None or max(rows.lengths) <= window:
            return rows, ()
        limits = self.limits(rows, window)
        remainder = tuple(tuple(row[limit:]) for row, limit in zip(rows.lists(), limits, strict=True))
        lengths = tuple(map(min, rows.lengths, limits))
        return rows.columns(slice(max(lengths)), lengths), remainder

    @abstractmethod
    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor | None]:
        """The memory of rows that fit the window, and the hidden states [B, K, d] at the learned memory tokens.

        The hidden states are None if they were not kept because the losses do not include the compression loss.
        """

    def remember(self, places: Places, contexts: Rows, hidden_states: Tensor | None = None, **kept: Any) -> Memory:
        """The memory of contexts after their pass, as `encode_rows` returns it.

        Args:
            places: may be kept for other contexts of these lengths: the memory has copies of its tensors.
            contexts: without a BOS of the method's own.
            hidden_states: [B, n, d], the outputs of the pass; None: no token of it predicts the text.
            kept: `layers` or `embeddings` of the memory.
        """
        if hidden_states is not None and places.last_rows is not None:
            kept["last"] = hidden_states.take_along_dim(places.last_rows[:, None, None], 1)[:, 0]
        return Memory(
            source=cast(Any, self).source,
            lengths=places.lengths,
            context_lengths=contexts.lengths,
            positions=places.positions.clone(),
            starts=places.starts,
            ordinals=None if places.ordinals is None else places.ordinals.clone(),
            **kept,
        )

    @abstractmethod
    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0 or 1, d]: the task token between memory and text; without one, `Memory.last` predicts the text."""

    def starts(self, memory: Memory, task: Task) -> tuple[int, ...]:
        """The position ID of each row's task token, or of its text if there is none."""
        return memory.starts

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The logical order, by which sliding windows count, of memory tokens [B, K] and of each row's text."""
        return torch.arange(memory.num_tokens).repeat(memory.batch_size, 1), memory.lengths

    def rotated_over(self, memory: Memory) -> int:
        """Tokens of the pass that rotated a memory's keys, on which RoPE's frequencies may depend (`changing_rope`)."""
        return max(memory.starts)

    shared_columns: ClassVar[int] = 0
    """Memory tokens at the beginning of each row that `join` keeps only of the first memory."""

    def offsets(self, memory: Memory) -> tuple[int, ...]:
        """How many positions `join` moves what follows a memory, in each row."""
        source = memory.source
        if source.carrier == "kv":
            return memory.context_lengths if source.numbered_through else (0,) * memory.batch_size
        return memory.context_lengths if source.consistent else memory.lengths

    def positions_behind(self, first: Memory, second: Memory, delta: Tensor) -> Tensor:
        """The `positions` of a memory that `join` moves by `delta` [B, 1] after another."""
        return second.positions + delta

    def check_documents(self, memories: Sequence[Memory]) -> None:  # noqa: B027
        """Refuses memories, each readable, that `join` cannot make one of."""

    def key_biases(self, memory: Memory) -> list[Tensor] | None:
        """For each layer the bias on the logits of the memory's keys, float32 [B, Hk, K]; None: no bias."""
        return None

    def context_spans(self, memory: Memory) -> Tensor:
        """The context span [start, end) that each memory token represents, int64 [B, K, 2] on the CPU.

        If each layer and key head keeps its own tokens (`Select`), [B, K, A, 2] for A layers and heads, layer by layer.
        (0, 0) for BOS and padding.

        Raises:
            ValueError: if the memory is of images.
        """
        spans = torch.zeros(memory.batch_size, memory.num_tokens, 2, dtype=torch.int64)
        for row, length in enumerate(memory.lengths):
            bos, documents = self.documents_of(memory, row)
            ends = accumulate(bos + tokens for tokens in documents)
            self.check_size(memory, row, documents)
            parts = [self.parts_of(memory, tokens) + end - tokens for tokens, end in zip(documents, ends, strict=True)]
            spans[row, self.shared_columns : length] = torch.from_numpy(np.concatenate(parts))
        return spans

    def check_size(self, memory: Memory, row: int, documents: Sequence[int]) -> None:
        """Refuses documents of other sizes than a row's memory tokens: a file may say that they are of any size."""
        expected = sum(self.size(tokens, memory.source.chunk) for tokens in documents)
        if (found := memory.lengths[row] - self.shared_columns) != expected:
            raise ValueError(f"memory: expected {expected} memory tokens for its documents, got {found}")

    def documents_of(self, memory: Memory, row: int) -> tuple[int, Sequence[int]]:
        """1 if the documents of a row begin with BOS, else 0; and the tokens of each of them besides it."""
        return 0, memory.documents[row]

    def parts_of(self, memory: Memory, context: int) -> NDArray[np.int64]:
        """The spans [start, end) int64 [K, 2] of a document that its memory tokens stand for."""
        raise NotImplementedError

    @property
    def reach(self) -> int | None:
        """Tokens of a context that one pass of `encode` reads; a longer one is read in parts. None: all."""
        return None

    def kept_tokens(self, memory: Memory) -> list[int]:
        """The first row's tokens, counted from BOS where it is read, that the memory keeps; []: it keeps no tokens."""
        return []

    def part_ends(self, row: Sequence[int]) -> list[int]:
        """Where the parts end in which a context is read."""
        return [len(row)]

    def size(self, context: int, ratio: int | None = None) -> int:
        """Memory tokens that a context of this many tokens becomes at most, neither with BOS.

        Args:
            ratio: instead of the compressor's own, for methods that have any.
        """
        raise ValueError(f"compressor: expected one of texts, for a budget or context_spans, got one of {self.method}")

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row are compressed."""
        return (window,) * rows.batch_size

    def text(self, name: str, rows: Rows) -> Rows:
        """`rows` of the argument `name` of `forward`, checked."""
        return rows

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them uncompressed."""
        return contexts

    def segments(self, compressed: Rows) -> Tensor:
        """The context tokens that the compression loss predicts from each memory token."""
        return segment_targets(compressed.ids, self.options.chunk, self.options.memory_tokens, compressed.lengths)

    def of_gists(self, name: str) -> bool:
        """Whether the parameter of this name is used only for gists."""
        return False
