"""Compressor: the interface of all methods, from contexts to memories, losses and answers, and their files."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gistkit.common.checks import whole
from gistkit.common.languages import unlike
from gistkit.common.trained import find
from gistkit.compress import decode, training
from gistkit.compress.config import Config
from gistkit.compress.files import download, load_compressor, load_tokenizer, push_compressor, save_compressor
from gistkit.compress.generation import ask, generate, to_cache
from gistkit.compress.identity import Identity
from gistkit.compress.losses import check_losses, segment_targets
from gistkit.compress.memory import Memory, Source, Task
from gistkit.compress.memory_join import join
from gistkit.compress.model import Adapters, Copies, SharedModel, Use
from gistkit.compress.tokens import QUESTION, Rows, as_rows, pad, text_ids, texts_of
from gistkit.hf.cache import MemoryCache
from gistkit.layouts import Plan

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

# Tokens of a context that tell its language.
LANGUAGE = 1024


class Compressor(nn.Module, ABC):
    """A model with a method: `encode` makes memories of contexts, and text is read after them.

    Threads may share a compressor, and compressors may share a model, to encode, read and generate: one thread at a
    time runs a pass, and the others wait. Training is not thread-safe.

    A method is a subclass `class Name(..., config=NameConfig)`, see `gistkit.compress.config`.

    Args:
        model: a transformers causal language model; all passes use its one copy of the weights.
        config: the method's arguments; they may be given by name instead.
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
    reader: str | None = None
    """The role whose adapter the decoder runs with; None: no adapter."""

    def __init_subclass__(cls, config: type[Config] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if config is not None:
            config.compressor, cls.config_class = cls, config
            cls.method, cls.carrier, cls.needs_training = config.method, config.carrier, config.needs_training
            cls.__signature__ = config.signature()  # type: ignore[attr-defined]

    def __init__(self, model: PreTrainedModel, config: Config | None = None, **settings: Any) -> None:
        if config is None:
            self.config_class.check_names(settings)
            config = self.config_class(**settings)
        elif settings:
            raise TypeError(f"{min(settings)}: not allowed with a config, got {settings[min(settings)]!r}")
        super().__init__()
        self.lm = SharedModel(model)
        if self.carrier == "kv" and self.lm.traits.keys is not None:
            raise TypeError(
                f"model: expected one that reads keys and values of an earlier pass, as {self.method} does, got "
                f"{type(model).__name__}: {self.lm.traits.keys}"
            )
        config.check_model(model)
        # Registered here, because parameters have its name in checkpoints.
        self.model = model
        self.copies: Copies | None = None
        self.identity = Identity(self)
        self._tokenizer: Any = None
        # Where it was read from.
        self._home: Path | None = None
        # Tokens of the longest context that `forward` has trained on, also before it was saved; None: unknown.
        self.trained_length: int | None = None
        # Those of its training's texts, such as "en"; None: unknown.
        self.languages: tuple[str, ...] | None = None
        end_token = getattr(config, "end_token", None)
        if end_token is not None:
            self.lm.first_token("end_token", end_token)
        self.options = config
        self._source: Source | None = None
        self.compression_head: nn.Module | None = None
        if "compression" in self.loss_weights:
            self.add_compression_head()

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that the compressor was made with, except those of `lora`; JSON values."""
        return self.options.settings

    @property
    def chunk(self) -> int:
        """Context tokens of a chunk."""
        return self.options.chunk

    @property
    def memory_tokens(self) -> int:
        """Memory tokens of a chunk."""
        return self.options.memory_tokens

    @property
    def ratio(self) -> float:
        """Context tokens per memory token, L / M."""
        return self.chunk / self.memory_tokens

    @property
    def train_ratios(self) -> tuple[int, ...]:
        """The ratios of which `forward` draws one at each call in training mode; (): none is drawn."""
        return getattr(self.options, "train_ratios", ())

    @property
    def title(self) -> str:
        """The title in tables, such as FiveHundredX EPL 5x."""
        return self.options.title

    @property
    def loss_weights(self) -> dict[str, float]:
        """{name: weight} of the losses that `forward` returns."""
        return cast("dict[str, float]", self.options.losses)

    @property
    def window(self) -> int | None:
        """The number of tokens of a longer context that are compressed; None: all."""
        return getattr(self.options, "window", None)

    @property
    def end_token(self) -> int | None:
        """The token that ends the reconstruction of a context; None: no token."""
        return getattr(self.options, "end_token", None)

    @classmethod
    def arguments(cls) -> set[str]:
        """The names of the keyword arguments of the constructor."""
        return cls.config_class.names()

    @property
    def embed(self) -> nn.Embedding:
        """The model's input embedding."""
        return self.lm.embed

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self.lm.config

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.lm.device

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self.lm.vocabulary

    @property
    def encoder_lm(self) -> SharedModel:
        """The model that encodes, whose adapters or own weights train: `lm` itself without a second model."""
        return self.lm

    @property
    def adapters(self) -> Adapters | None:
        """The compressor's LoRA adapters by role; None if the encoding model's own weights train."""
        return self.encoder_lm.adapters

    @property
    def keeps_base(self) -> bool:
        """Whether the model that reads stays as it was."""
        return self.adapters is not None or self.encoder_lm is not self.lm

    @property
    def output_embedding(self) -> dict[str, Any]:
        """The output embedding, as keyword arguments of the losses."""
        return {"weight": self.lm.head.weight, "bias": self.lm.head.bias, "softcap": self.lm.softcap}

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, for `compress` and `ask`; it may be set.

        The default is the tokenizer of the folder that the compressor was loaded from, else that of the base model, if
        the model knows where it was loaded from.

        Raises:
            ValueError: if there is none.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._home, self.model)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def source(self) -> Source:
        """The source that a readable memory has."""
        structure = self.lm.structure
        if self._source is None or self._source.structure != structure:
            width = 2 * sum(heads * head_dim for heads, head_dim in self.lm.head_shapes)
            options = self.options
            self._source = Source(
                self.method, self.carrier, options.of_memory, options.chunk, options.memory_tokens, structure, width
            )
        return self._source

    def install(self, lora: Mapping[str, LoraConfig] | None, copies: str | None = None, *, norms: bool = False) -> None:
        """See `SharedModel.install`."""
        check_base(self.loss_weights, lora is not None or self.encoder_lm is not self.lm)
        self.encoder_lm.install(lora, copies, norms=norms, by_role=self.adapts_some)
        self.copies = self.lm.copies

    def add_parts(self) -> None:
        """Adds the modules that the method trains beside the model."""
        for name, part in self.options.parts(self.embed).items():
            setattr(self, name, part)

    def add_compression_head(self) -> None:
        """Adds the untrained head of the compression loss."""
        self.compression_head = self.options.head(self.lm.width, self.vocabulary).to(self.device)

    def check_head(self) -> None:
        """Refuses another ratio than that of the head of the compression loss."""
        head: Any = self.compression_head
        if head is not None and head.offsets != -(-self.chunk // self.memory_tokens):
            raise ValueError(
                f"ratio: expected {head.offsets} to train or save, that of the head of the loss 'compression', got "
                f"{self.chunk}"
            )

    def set_losses(self, losses: Iterable[str] | Mapping[str, float]) -> None:
        """Changes the losses that `forward` returns; "compression" needs a compressor that was made with it."""
        options = replace(self.options, losses=check_losses(losses))
        check_base(cast("dict[str, float]", options.losses), self.keeps_base)
        if "compression" in cast("dict[str, float]", options.losses) and self.compression_head is None:
            raise ValueError(
                "losses: expected no 'compression' for a compressor that was made without it, got "
                + ", ".join(cast("dict[str, float]", options.losses))
            )
        self.options = options

    def set_window(self, window: int | None) -> None:
        """Changes how many tokens of a longer context are compressed; None: all of them.

        Raises:
            ValueError: if the method has no window, or that is out of range.
        """
        if "window" not in self.arguments():
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
        other.options, other._source = options, None
        return other

    def size(self, context: int) -> int:
        """Memory tokens that a context of this many tokens becomes at most, neither with BOS."""
        raise ValueError(f"budget: expected none for {self.method}, whose memory tokens are not those of a text")

    def _within(self, contexts: Any, attention_mask: Any, ratio: int | None, budget: int | None) -> Self:
        """The compressor at `ratio`, or at the least one at which every context has at most `budget` memory tokens."""
        if budget is None:
            return self if ratio is None else self.at(ratio)
        if ratio is not None:
            raise ValueError(f"budget: expected none beside ratio {ratio}, got {budget}")
        budget, (rows, _) = whole("budget", budget), self.cut(self.contexts(contexts, attention_mask))
        # Without their BOS.
        lengths = [length - bos for length, bos in zip(rows.lengths, self.limits(rows, 0), strict=True)]
        has_one = getattr(self.options, "budget", None) is not None or not self.options.any_ratio
        found = self if has_one else self.at(-(-max(lengths) // budget))
        if (most := max(map(found.size, lengths))) > budget:
            raise ValueError(
                f"budget: expected at least {most}, the memory tokens of contexts of up to {max(lengths)} tokens, "
                f"got {budget}"
            )
        return found

    def using(self, use: Use) -> AbstractContextManager[None]:
        """See `SharedModel.using`."""
        return self.lm.using(use)

    def folded(self) -> AbstractContextManager[None]:
        """Inside, memories are read by copies of the linear maps with the LoRA adapter merged into their weights.

        A token then needs no separate products with the adapter. `generate`, `ask` and `Conversation` do this
        automatically for answers of several tokens; a `LanguageModel` and its `Stream`s also run faster inside. The
        copies take as much memory as the maps with LoRA, until the compressor is trained or moved. They are sums in
        float32, rounded to the weights' dtype. In float32 the tokens are the same, unless two are equally likely to
        within rounding; in bfloat16 an answer may differ. Only passes without gradients in eval mode use the copies,
        and parameters must not change inside. Maps with adapters other than plain LoRA are not copied.
        """
        return self.lm.folded(self.reader, self.versions())

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, as for any module; True also frees what answers have cached."""
        if mode:
            self.lm.release()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Weights move, or change their dtype.
        self.lm.release()
        return super()._apply(fn, recurse)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., V] of hidden states, fp32, scaled and capped as the model does."""
        return self.lm.logits(hidden_states)

    def gradient_checkpointing_enable(self) -> None:
        """Keeps only each layer's inputs for the backward pass, which computes everything else again."""
        self.lm.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Undoes `gradient_checkpointing_enable`."""
        self.lm.gradient_checkpointing_disable()

    def fingerprint(self) -> str:
        """The base model's fingerprint, recomputed only when its weights have changed."""
        return self.fingerprints()[0]

    def own_fingerprint(self) -> str:
        """The fingerprint of the compressor's own weights, recomputed only when they have changed."""
        return self.fingerprints()[1]

    def fingerprints(self) -> tuple[str, str]:
        """`fingerprint` and `own_fingerprint`, from one look at the weights."""
        return self.identity.fingerprints()

    def versions(self, *, anywhere: bool = True) -> tuple[Any, Any]:
        """See `Identity.versions`."""
        return self.identity.versions(anywhere=anywhere)

    @abstractmethod
    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor | None]:
        """The memory of rows that fit the window, and the hidden states [B, K, d] at the learned memory tokens.

        The hidden states are None if they were not kept because the losses do not include the compression loss.
        """

    @abstractmethod
    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0 or 1, d]: the task token between memory and text; without one, `Memory.last` predicts the text."""

    def starts(self, memory: Memory, task: Task) -> tuple[int, ...]:
        """The position ID of each row's task token, or of its text if there is none."""
        return memory.starts

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The logical order, by which sliding windows count, of memory tokens [B, K] and of each row's text."""
        return torch.arange(memory.num_tokens).repeat(memory.batch_size, 1), memory.lengths

    def key_biases(self, memory: Memory) -> list[Tensor] | None:
        """For each layer the bias on the logits of the memory's keys, float32 [B, Hk, K]; None: no bias."""
        return None

    def stands_for(self, memory: Memory) -> Tensor:
        """The context span [start, end) that each memory token represents, int64 [B, K, 2] on the CPU.

        If each layer and key head keeps its own tokens (`Select`), [B, K, A, 2] for A layers and heads, layer by layer.
        (0, 0) for BOS and padding.

        Raises:
            ValueError: if the memory is of images.
        """
        raise ValueError(f"memory: expected one of a text, got one of method {memory.source.method!r}")

    def encode(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        ratio: int | None = None,
        budget: int | None = None,
        gradient: bool = False,
    ) -> Memory:
        """Compresses a batch of contexts in one pass over all their chunks.

        If the model's RoPE frequencies depend on the length of a pass (dynamic, longrope), rows are encoded one at a
        time, so that a memory depends only on its own text.

        The memory is detached from the graph. (`forward`, which trains, keeps gradients anyway.)

        Args:
            input_ids: int64 [B, p], or lists of ids of any lengths, or a tokenizer's output. A row has at least 1
                token; one shorter than the ratio becomes one memory token in methods that compress in place.
            attention_mask: [B, p], 0 on padding at either end of a row; None: no padding, or the tokenizer's mask.
            ratio: compress at this ratio instead of the compressor's own, as in `at`.
            budget: most memory tokens of a row, without BOS; the ratio is then the least at which no row has more. A
                method of one ratio must keep to it by itself. In `Select` it is of each key head, on average with
                `shares`.
            gradient: keep the graph of the pass in the memory, for your own losses on what `decode` returns. The graph
                takes many times the memory's bytes.
        """
        at_ratio = self._within(input_ids, attention_mask, ratio, budget)
        if gradient and torch.is_grad_enabled():
            self.identity.forget()
        # Not inference mode, whose tensors no later graph could use.
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            memory, _, compressed = at_ratio.compress_rows(self.contexts(input_ids, attention_mask))
        self._tell_limits(compressed)
        fingerprint, maker = self.fingerprints()
        return replace(memory, fingerprint=fingerprint, maker=maker, model=self.identity.model)

    def _tell_limits(self, rows: Rows) -> None:
        """Warns of contexts unlike those that the compressor was trained on."""
        if self.trained_length is not None and max(rows.lengths) > self.trained_length:
            warnings.warn(
                f"input_ids: expected at most {self.trained_length} tokens, as the longest context that the compressor "
                f"was trained on has, got {max(rows.lengths)}: answers from its memory may be worse",
                stacklevel=3,
            )
        if self.languages is None:
            return
        with suppress(ValueError), self.lm.turn():
            if any(unlike(self.tokenizer.decode(row[:LANGUAGE]), self.languages) for row in rows.lists()):
                warnings.warn(
                    f"input_ids: expected prose in {', '.join(self.languages)}, as the compressor was trained on, got "
                    "a text with few common words of it: answers from its memory may be worse",
                    stacklevel=3,
                )

    def compress(
        self,
        text: str | Sequence[str],
        *,
        ratio: int | None = None,
        budget: int | None = None,
        gradient: bool = False,
        control_tokens: bool = False,
    ) -> Memory:
        """Compresses a text, or several as rows, with `tokenizer`, as `gistkit compress` does; see `encode`.

        Args:
            ratio, budget, gradient: as in `encode`.
            control_tokens: read the name of a special token in the text, such as <|im_end|>, as that token. False: read
                it as plain text.

        Raises:
            ValueError: if there is no tokenizer, or a text has no tokens.
        """
        # Tokenizers keep what they do with control tokens, which another thread may want otherwise.
        with self.lm.turn():
            rows = [text_ids(row, self.tokenizer, control_tokens=control_tokens) for row in texts_of("text", text)]
        return self.encode(rows, ratio=ratio, budget=budget, gradient=gradient)

    def ask(
        self,
        memory: Memory | str | Sequence[str],
        question: str | Sequence[str],
        *,
        template: str = QUESTION,
        control_tokens: bool = False,
        **options: Any,
    ) -> str | list[str]:
        """Answers questions about a memory, or about texts that it compresses first, as `gistkit ask` does.

        Args:
            memory: one row for any number of questions, or one row for each question.
            question: a text, asked about every row; or several texts.
            template: the text around a {question}, as in training. It may contain names of special tokens.
            control_tokens: also read names of special tokens in questions and texts as these tokens.
            options: as in `gistkit.compress.generation.generate`. Answers also stop at the tokenizer's end token.

        Returns:
            A text for one question and one row, otherwise a list of texts; stripped.

        Raises:
            ValueError: if there is no tokenizer.
        """
        if not isinstance(memory, Memory):
            memory = self.compress(memory, control_tokens=control_tokens)
        options["tokenizer"] = options.get("tokenizer") or self.tokenizer
        return ask(self, memory, question, template=template, control_tokens=control_tokens, **options)

    def decode(self, memory: Memory, task: Task, input_ids: Any, attention_mask: Any = None) -> Tensor:
        """Hidden states [B, 1 + T, d] before `input_ids` [B, T] (at the task token, or the memory) and at each of them.

        Args:
            memory: returned by `encode`. Its `rest` is read between the task token and the text.
            task: "ae" reconstructs the context, "lm" continues it, "qa" answers a question about it.
            input_ids, attention_mask: as in `encode`; rows may be empty.
        """
        return self.read(memory, task, self.rows("input_ids", input_ids, attention_mask))

    def rows(self, name: str, ids: Any, attention_mask: Any = None, shortest: int = 0) -> Rows:
        """The user's token ids, checked and padded on the right."""
        return as_rows(name, ids, attention_mask, vocabulary=self.vocabulary, device=self.device, shortest=shortest)

    def contexts(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """`rows` of contexts; each row needs at least one token."""
        return self.rows("input_ids", input_ids, attention_mask, shortest=1)

    def text(self, name: str, rows: Rows) -> Rows:
        """`rows` of the argument `name` of `forward`, checked."""
        return rows

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them uncompressed."""
        return contexts

    def segments(self, compressed: Rows) -> Tensor:
        """The context tokens that the compression loss predicts from each memory token."""
        return segment_targets(compressed.ids, self.chunk, self.memory_tokens, compressed.lengths)

    def compress_rows(self, rows: Rows) -> tuple[Memory, Tensor | None, Rows]:
        """The memory, the hidden states [B, K, d] at the memory tokens or None, and the tokens that were compressed."""
        self.lm.refuse_foreign_checkpointing()
        # Where RoPE's frequencies depend on the length of a pass, that length is a row's own.
        if rows.batch_size > 1 and type(rows) is Rows and self.lm.changing_rope:
            alone = [pad([row], rows.ids.device) for row in rows.lists()]
            memories, states, parts = zip(*map(self.compress_rows, alone), strict=True)
            hidden_states = None if None in states else pad_sequence([state[0] for state in states], batch_first=True)
            compressed = pad([*chain(*(part.lists() for part in parts))], rows.ids.device)
            return memories[0].stack(memories), hidden_states, compressed
        rows, remainder = self.cut(rows)
        memory, hidden_states = self.encode_rows(rows)
        return replace(memory, rest=remainder or memory.rest), hidden_states, rows

    def cut(self, rows: Rows) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
        """The part of contexts that is compressed, and each row's tokens after the window; () if there are none."""
        if self.window is None or max(rows.lengths) <= self.window:
            return rows, ()
        limits = self.limits(rows, self.window)
        remainder = tuple(tuple(row[limit:]) for row, limit in zip(rows.lists(), limits, strict=True))
        lengths = tuple(map(min, rows.lengths, limits))
        return rows.columns(slice(max(lengths)), lengths), remainder

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row are compressed."""
        return (window,) * rows.batch_size

    def read(self, memory: Memory, task: Task, rows: Rows, plan: Plan | None = None) -> Tensor:
        """`decode` of checked rows, under `reading_plan`'s plan or the given one."""
        return decode.read(self, memory, task, rows, plan)

    def reading_plan(self, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
        """The plan of [memory][task token][text]...; memory tokens that are cached keys have no query row.

        Errors about the length of the text name the argument `name`.
        """
        return decode.reading_plan(self, memory, task, texts, name)

    def last_of(self, memory: Memory) -> Tensor:
        """`Memory.last`; a ValueError if the memory has none."""
        return decode.last_of(memory)

    def check_readable(self, memory: Memory) -> None:
        """Refuses a memory of another method, shape or model, or on another device."""
        decode.check_readable(self, memory)

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        continuation_ids: Any = None,
        question_ids: Any = None,
        answer_ids: Any = None,
    ) -> dict[str, Tensor]:
        """Returns the losses named at construction, from one compression, and their weighted mean as "loss".

        Args:
            input_ids, attention_mask: the contexts, as in `encode`.
            continuation_ids: int64 [B, t], the tokens after each context, padded with -100 at the end, or lists; only
                for the loss "lm".
            question_ids, answer_ids: the same for the losses "qa", "kl", "reverse_kl" and "hidden": the answer is
                predicted after the question.

        In in-place methods the loss "lm" includes the first token of a continuation, which the encoder's last state
        predicts. That token says nothing about the memory, so `evaluate` leaves it out.

        Returns:
            fp32 scalars in nats per token, one for each loss and "loss"; "hidden" is in standard deviations.
        """
        return training.losses_of(self, input_ids, attention_mask, continuation_ids, question_ids, answer_ids)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trainable parameters by name, without other adapters in the model."""
        return training.trainable(self)

    def print_trainable_parameters(self) -> None:
        """Prints the number of trainable and of all parameters in one line, as PEFT's models do."""
        trained = {id(parameter): parameter.numel() for _, parameter in self.trainable()}
        total = sum(parameter.numel() for parameter in self.parameters())
        count = sum(trained.values())
        print(f"trainable params: {count:,} || all params: {total:,} || trainable%: {100 * count / total:.4f}")

    def parameter_groups(self, learning_rate: float, memory_factor: float = 3.0) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer; those of the gists have `memory_factor` times the learning rate.

        GistPool, Section 5.2: parameters that compress need a higher learning rate.
        """
        return training.parameter_groups(self, learning_rate, memory_factor)

    def of_gists(self, name: str) -> bool:
        """Whether the parameter of this name is used only for gists."""
        return False

    def generate(self, memory: Memory, prompt_ids: Any = None, attention_mask: Any = None, **options: Any) -> Tensor:
        """Tokens that follow [memory][task token][prompt]; see `gistkit.compress.generation.generate`."""
        return generate(self, memory, prompt_ids, attention_mask, **options)

    def to_cache(self, memory: Memory, task: Task = "lm") -> MemoryCache:
        """A transformers cache of [memory][task token], for `model.generate(ids, cache=cache)`.

        `gistkit.hf.CACHE` is the name of the argument in the installed release (`past_key_values` before transformers
        5.24).

        `model.generate` takes only the prompt, [B, N] with N >= 1; no option needs to account for the memory. The keys
        are rotated so that the prompt starts at position 0, which RoPE allows because it depends only on differences.
        Rows must have the same number of memory tokens; one row serves any number of prompts. Pad shorter prompts on
        the left and pass their mask [B, N], which `hf.cover_memory` prepares the model for. A call leaves its tokens in
        the cache, and the next call continues them if it gets all tokens; `cache.reset()` drops them. In-place methods
        with LoRA also have an adapter for the text, active inside `with compressor.using(compressor.reader)`. There
        gistkit's attention runs, which takes no padding. Passes that would read the memory differently, without that
        adapter or across the model's sliding window, raise a ValueError.

        Args:
            memory, task: as in `generate`; tokens after the window are read into the cache.

        Raises:
            TypeError: for a model without such RoPE, such as GPT-2, or with dynamic or longrope RoPE.
            ValueError: if rows have different numbers of memory tokens, or of tokens after the window; or if an
                in-place method has compressed more than the model's sliding window.
        """
        return to_cache(self, memory, task)

    def join(self, memories: Sequence[Memory]) -> Memory:
        """Joins memories of several documents into one context, see `gistkit.compress.memory_join.join`."""
        return join(self, memories)

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves what training changed: safetensors, PEFT adapters, compressor.json with the settings, and a card.

        An existing card is kept. The tokenizer is saved too if one is set or was used. Each adapter is a folder that
        `peft.PeftModel.from_pretrained` loads.
        """
        save_compressor(self, Path(folder))

    def push_to_hub(self, name: str, *, private: bool | None = None, **options: Any) -> str:
        """Uploads what `save_pretrained` saves to the Hugging Face hub, with a model card; returns the URL.

        The card is the README.md of the folder that the compressor was loaded from, or a minimal one.

        Args:
            name: "owner/name" of the repository, which is created if needed.
            private: whether a new repository is private.
            options: token, and what `huggingface_hub.HfApi.upload_folder` takes, such as commit_message and revision.
        """
        return push_compressor(self, name, self._home, private, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        model: PreTrainedModel | None = None,
        *,
        tokenizer: Any = None,
        encoder: PreTrainedModel | str | None = None,
        allow_regex: bool = False,
        **options: Any,
    ) -> Compressor:
        """Loads a compressor that `save_pretrained` saved, around its base model.

        Folders from strangers are safe to load: none of their code runs, nothing outside the folder is opened, and
        sizes are checked against the files and the model before memory is allocated.

        Args:
            folder: a folder of `save_pretrained`, the name of a compressor that comes with gistkit (see `trained`), or
                "owner/name" on the Hugging Face hub.
            model: the base model; None if the folder holds it (a compressor without LoRA).
            tokenizer: see the property; None: as it says.
            encoder: that of a method with a second model, or its name on the hub or folder; None: the folder holds it,
                or has its name on the hub.
            allow_regex: allow adapters that select modules by regular expressions, as your own `LoraConfig` may; a
                hostile expression never ends.
            options: for a repository, what `huggingface_hub.snapshot_download` takes, such as revision and token.

        Raises:
            TypeError: for options with a local folder.
            FileNotFoundError, ValueError: if the folder has no compressor, or one of another model, method or version.
                The model is then unchanged.
        """
        home = find(folder)
        if not home.is_dir():
            home = download(folder, **options) or home
        elif options:
            raise TypeError(f"{min(options)}: expected no such argument for {home}, which is no repository of the hub")
        compressor = cast(Compressor, load_compressor(cls, home, model, allow_regex, encoder))
        compressor._home, compressor._tokenizer = home, tokenizer
        return compressor


def check_base(losses: Mapping[str, float], base_frozen: bool) -> None:
    """Refuses the losses whose teacher is the base model, if that trains."""
    found = next((name for name in training.TAUGHT if name in losses), None)
    if found is not None and not base_frozen:
        raise ValueError(
            f"losses: expected '{found}' beside LoRA, as training without it changes the base model, got lora None"
        )
