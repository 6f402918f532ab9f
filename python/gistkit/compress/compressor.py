"""Compressor: the one interface of all methods, from contexts to memories, losses and answers, and its files."""

from __future__ import annotations

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
LANGUAGE = 512


class Compressor(nn.Module, ABC):
    """A model with a method: `encode` makes memories of contexts, and text is read after them.

    Threads may share a compressor, and compressors a model, to encode, read and generate: one thread at a time is in a
    pass, and the others wait. Training is no such use: its backward pass and rounded weights take no turn.

    A method is a subclass `class Name(..., config=NameConfig)`, see `gistkit.compress.config`.

    Args:
        model: a transformers causal language model; its one copy of the weights serves all passes.
        config: the method's arguments; they may be given by name instead.
    """

    config_class: ClassVar[type[Config]]
    method: ClassVar[str]
    carrier: ClassVar[str] = "kv"
    needs_training: ClassVar[bool] = True
    """Whether a memory is noise to a model before the compressor was trained."""
    encoder_predicts_first: ClassVar[bool] = False
    """Whether `Memory.last`, which has read the whole context, predicts a continuation's first token."""
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
            raise TypeError(f"{min(settings)}: expected none beside a config, got {settings[min(settings)]!r}")
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
        """Context tokens a memory token stands for, L / M."""
        return self.chunk / self.memory_tokens

    @property
    def title(self) -> str:
        """The name in tables, such as FiveHundredX EPL 5x."""
        return self.options.title

    @property
    def loss_weights(self) -> dict[str, float]:
        """{name: weight} of what `forward` returns."""
        return cast("dict[str, float]", self.options.losses)

    @property
    def window(self) -> int | None:
        """Only so many tokens of a longer context are compressed; None: all of them."""
        return getattr(self.options, "window", None)

    @property
    def end_token(self) -> int | None:
        """The token that ends the reconstruction of a context; None: there is none."""
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
        """Token ids that the model knows."""
        return self.lm.vocabulary

    @property
    def adapters(self) -> Adapters | None:
        """The compressor's LoRA adapters by role; None where the model's own weights train."""
        return self.lm.adapters

    @property
    def output_embedding(self) -> dict[str, Any]:
        """The output embedding as arguments of the losses."""
        return {"weight": self.lm.head.weight, "bias": self.lm.head.bias, "softcap": self.lm.softcap}

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, for `compress` and `ask`; it may be set.

        Otherwise it is that of the folder that the compressor was read from or, as far as it names where it was loaded
        from, that of the base model.

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
        """What a readable memory was made with."""
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
        check_base(self.loss_weights, lora is not None)
        self.lm.install(lora, copies, norms=norms)
        self.copies = self.lm.copies

    def add_parts(self) -> None:
        """Gives the compressor what the method trains beside the model."""
        for name, part in self.options.parts(self.embed).items():
            setattr(self, name, part)

    def add_compression_head(self) -> None:
        """Gives the compressor the map that the compression loss trains, untrained."""
        self.compression_head = self.options.head(self.lm.width, self.vocabulary).to(self.device)

    def set_losses(self, losses: Iterable[str] | Mapping[str, float]) -> None:
        """Changes what `forward` returns; the compression loss needs a compressor that was made with it."""
        options = replace(self.options, losses=check_losses(losses))
        check_base(cast("dict[str, float]", options.losses), self.adapters is not None)
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

    def using(self, use: Use) -> AbstractContextManager[None]:
        """See `SharedModel.using`."""
        return self.lm.using(use)

    def folded(self) -> AbstractContextManager[None]:
        """Inside, what reads a memory runs on copies of its maps with the LoRA adapter added into their weights.

        A token then needs no products of the adapter's own. `generate`, `ask` and `Conversation` do so by themselves
        for answers of several tokens; a `LanguageModel` and its `Stream`s run faster inside. The copies take the memory
        of the maps that have LoRA, until the compressor is trained or moved. They are sums in float32, rounded to the
        weights' dtype: in float32 the tokens are those beside the maps, unless two are as likely to within rounding; in
        bfloat16 an answer may differ. They serve passes without gradients in eval mode; parameters must not change
        inside. Maps with other adapters than plain LoRA stay as they are.
        """
        return self.lm.folded(self.reader, self.versions())

    def train(self, mode: bool = True) -> Self:
        """As of any module; True frees what answers have kept for the next one."""
        if mode:
            self.lm.release()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Weights move, or change their dtype.
        self.lm.release()
        return super()._apply(fn, recurse)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., V] of hidden states, fp32, scaled and capped where the model scales or caps them."""
        return self.lm.logits(hidden_states)

    def gradient_checkpointing_enable(self) -> None:
        """Keeps only each layer's inputs for the backward pass, which computes everything else again."""
        self.lm.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Undoes `gradient_checkpointing_enable`."""
        self.lm.gradient_checkpointing_disable()

    def fingerprint(self) -> str:
        """The base model's fingerprint, computed again only when its weights have changed."""
        return self.fingerprints()[0]

    def own_fingerprint(self) -> str:
        """The fingerprint of the compressor's own weights, computed again only when they have changed."""
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

        They are None where the compression loss, which reads them, is none of the losses and they were not kept.
        """

    @abstractmethod
    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0 or 1, d]: the task token between memory and text; without one, `Memory.last` predicts the text."""

    def starts(self, memory: Memory, task: Task) -> tuple[int, ...]:
        """Where the text begins: the position id of each row's task token, or of its text without one."""
        return memory.starts

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The logical order, by which sliding windows count, of memory tokens [B, K] and of each row's text."""
        return torch.arange(memory.num_tokens).repeat(memory.batch_size, 1), memory.lengths

    def key_biases(self, memory: Memory) -> list[Tensor] | None:
        """For each layer what is added to the logits of the memory's keys, float32 [B, Hk, K]; None: nothing is."""
        return None

    def stands_for(self, memory: Memory) -> Tensor:
        """The context tokens that each memory token stands for, as [start, end), int64 [B, K, 2] on the CPU.

        Where each layer and key head has tokens of its own (`Select`), [B, K, A, 2] for A of them, layer by layer.
        (0, 0) for those that stand for none: BOS, and padding.

        Raises:
            ValueError: if the memory is of images.
        """
        raise ValueError(f"memory: expected one of a text, got one of method {memory.source.method!r}")

    def encode(self, input_ids: Any, attention_mask: Any = None, *, gradient: bool = False) -> Memory:
        """Compresses a batch of contexts in one pass over all their chunks.

        Where the frequencies of the model's RoPE depend on the length of a pass (dynamic, longrope), rows are encoded
        one at a time: a memory depends on its own text alone.

        The memory is a constant, which holds nothing but itself. (`forward`, which trains, has gradients anyway.)

        Args:
            input_ids: int64 [B, p], or lists of ids of any lengths, or a tokenizer's output. A row has at least 1
                token; one shorter than the ratio becomes one memory token in methods that compress in place.
            attention_mask: [B, p], 0 on padding at either end of a row; None: no padding, or the tokenizer's mask.
            gradient: the memory keeps the graph of its pass, for losses of one's own on what `decode` returns; the
                graph takes many times the memory's bytes.
        """
        if gradient and torch.is_grad_enabled():
            self.identity.forget()
        # Not inference mode, whose tensors no later graph could use.
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            memory, _, compressed = self.compress_rows(self.contexts(input_ids, attention_mask))
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

    def compress(self, text: str | Sequence[str], *, gradient: bool = False, control_tokens: bool = False) -> Memory:
        """`encode` of a text, or of a row for each of several, with `tokenizer`, as `gistkit compress` does.

        Args:
            gradient: as in `encode`.
            control_tokens: the name of a special token in the text, such as <|im_end|>, is that token; else it is text.

        Raises:
            ValueError: if there is no tokenizer, or a text has no tokens.
        """
        # Tokenizers keep what they do with control tokens, which another thread may want otherwise.
        with self.lm.turn():
            rows = [text_ids(row, self.tokenizer, control_tokens=control_tokens) for row in texts_of("text", text)]
        return self.encode(rows, gradient=gradient)

    def ask(
        self,
        memory: Memory | str | Sequence[str],
        question: str | Sequence[str],
        *,
        template: str = QUESTION,
        control_tokens: bool = False,
        **options: Any,
    ) -> str | list[str]:
        """The answers to questions about a memory, or about texts that are compressed first, as `gistkit ask` does.

        Args:
            memory: of one row, which serves any number of questions, or with a row for each of them.
            question: a text, asked of every row; or several.
            template: the text around a {question}, as in training. Special tokens may be named in it.
            control_tokens: they may be named in questions, and texts to compress, too; else their names are text.
            options: as in `gistkit.compress.generation.generate`. Answers also end at the tokenizer's end token.

        Returns:
            A text for one question to one row, otherwise a list of them; without spaces around them.

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
            memory: what `encode` returned. Its `rest` is read between the task token and the text.
            task: "ae" reconstructs the context, "lm" continues it, "qa" answers a question about it.
            input_ids, attention_mask: as in `encode`; rows may be empty.
        """
        return self.read(memory, task, self.rows("input_ids", input_ids, attention_mask))

    def rows(self, name: str, ids: Any, attention_mask: Any = None, shortest: int = 0) -> Rows:
        """A user's token ids, checked and padded at the end of rows."""
        return as_rows(name, ids, attention_mask, vocabulary=self.vocabulary, device=self.device, shortest=shortest)

    def contexts(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """`rows` of contexts, each of at least one token."""
        return self.rows("input_ids", input_ids, attention_mask, shortest=1)

    def text(self, name: str, rows: Rows) -> Rows:
        """`rows` of the argument `name` of `forward`, checked."""
        return rows

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them whole."""
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
        """The part of contexts that is compressed, and each row's tokens behind the window; () where there are none."""
        if self.window is None or max(rows.lengths) <= self.window:
            return rows, ()
        limits = self.limits(rows, self.window)
        remainder = tuple(tuple(row[limit:]) for row, limit in zip(rows.lists(), limits, strict=True))
        lengths = tuple(map(min, rows.lengths, limits))
        return rows.columns(slice(max(lengths)), lengths), remainder

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row a window compresses."""
        return (window,) * rows.batch_size

    def read(self, memory: Memory, task: Task, rows: Rows, plan: Plan | None = None) -> Tensor:
        """`decode` of checked rows; under a plan of one's own, in place of `reading_plan`'s, if there is one."""
        return decode.read(self, memory, task, rows, plan)

    def reading_plan(self, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
        """The plan of [memory][task token][text]...; memory tokens that are cached keys have no row of their own.

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
        """The losses named at construction, all from one compression, and their weighted mean as "loss".

        Args:
            input_ids, attention_mask: the contexts, as in `encode`.
            continuation_ids: int64 [B, t], the tokens after each context, padded with -100 at the end, or lists; only
                for the loss "lm".
            question_ids, answer_ids: the same for the losses "qa" and "kl": the answer is predicted after the question.

        The loss "lm" of a method in place counts the first token of a continuation too, which is predicted by the
        encoder's last state and trains that prediction. It says nothing of the memory: `evaluate` leaves it out.

        Returns:
            fp32 scalars in nats a token, one for each loss and "loss".
        """
        return training.losses_of(self, input_ids, attention_mask, continuation_ids, question_ids, answer_ids)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that train, by name, without other adapters in the model."""
        return training.trainable(self)

    def print_trainable_parameters(self) -> None:
        """Prints how many parameters train, of how many, in one line as PEFT's models do."""
        trained = {id(parameter): parameter.numel() for _, parameter in self.trainable()}
        total = sum(parameter.numel() for parameter in self.parameters())
        count = sum(trained.values())
        print(f"trainable params: {count:,} || all params: {total:,} || trainable%: {100 * count / total:.4f}")

    def parameter_groups(self, learning_rate: float, memory_factor: float = 3.0) -> list[dict[str, Any]]:
        """The parameters as an optimizer takes them; those of the gists have `memory_factor` times the learning rate.

        GistPool, Section 5.2: parameters that compress need a higher learning rate.
        """
        return training.parameter_groups(self, learning_rate, memory_factor)

    def of_gists(self, name: str) -> bool:
        """Whether the parameter of this name is used for gists only."""
        return False

    def generate(self, memory: Memory, prompt_ids: Any = None, attention_mask: Any = None, **options: Any) -> Tensor:
        """Tokens that follow [memory][task token][prompt]; see `gistkit.compress.generation.generate`."""
        return generate(self, memory, prompt_ids, attention_mask, **options)

    def to_cache(self, memory: Memory, task: Task = "lm") -> MemoryCache:
        """A transformers cache of [memory][task token], for `model.generate(ids, cache=cache)` behind it.

        Before transformers 5.24 the argument is `past_key_values`; `gistkit.hf.CACHE` names it in the installed one.

        `model.generate` takes the prompt alone, [B, N] of any N >= 1, and none of its options needs to know of the
        memory: its keys are rotated so that the prompt stands at position 0, which is all the same to RoPE. Rows must
        have the same number of memory tokens; one row serves prompts of any number. Shorter prompts are padded at their
        start, and the model, which `hf.cover_memory` prepares here, takes their mask [B, N]. A call of `model.generate`
        leaves its tokens in the cache, which the next one continues, given all of them; `cache.reset()` drops them.
        Methods in place with LoRA have an adapter for the text too, which is on inside
        `with compressor.using(compressor.reader)`; there gistkit's attention reads, which takes no padding. Passes that
        would read the memory otherwise, without that adapter or across the model's sliding window, raise a ValueError.

        Args:
            memory, task: as in `generate`; tokens behind the window are read into the cache.

        Raises:
            TypeError: for a model without such RoPE, such as GPT-2, or with dynamic or longrope RoPE.
            ValueError: if rows have different numbers of memory tokens, or of tokens behind the window; or if a method
                in place has compressed more than the model's sliding window.
        """
        return to_cache(self, memory, task)

    def join(self, memories: Sequence[Memory]) -> Memory:
        """The memories of several documents as one context, in that order; see `gistkit.compress.memory_join.join`."""
        return join(self, memories)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes what training changed: safetensors, the PEFT adapter, compressor.json with the settings, and a card.

        A card that the folder has stays. The tokenizer is written too where one is set or has been used. Each adapter
        is a folder that `peft.PeftModel.from_pretrained` reads.
        """
        save_compressor(self, Path(folder))

    def push_to_hub(self, name: str, *, private: bool | None = None, **options: Any) -> str:
        """Uploads what `save_pretrained` writes to the Hugging Face hub, with a model card; returns its address.

        The card is the README.md of the folder that the compressor was read from, or a minimal one.

        Args:
            name: "owner/name" of the repository, which is made if there is none.
            private: whether a new one is.
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
        allow_regex: bool = False,
        **options: Any,
    ) -> Compressor:
        """The compressor that `save_pretrained` wrote, around its base model.

        A folder of anybody may be read: no code of it runs, nothing outside it is opened, and sizes are checked against
        its files and the model before memory is asked for.

        Args:
            folder: what `save_pretrained` wrote, or the name of a compressor that comes with gistkit, see `trained`, or
                "owner/name" of a repository of the Hugging Face hub.
            model: the base model; None if the folder holds it (a compressor without LoRA).
            tokenizer: see the property; None: as it says.
            allow_regex: the adapters may select modules by regular expressions, as a `LoraConfig` of one's own may; a
                hostile one never ends.
            options: for a repository, what `huggingface_hub.snapshot_download` takes, such as revision and token.

        Raises:
            TypeError: for options beside a folder.
            FileNotFoundError, ValueError: if the folder has no compressor, or one of another model, method or version.
                The model is then as it was.
        """
        home = find(folder)
        if not home.is_dir():
            home = download(folder, **options) or home
        elif options:
            raise TypeError(f"{min(options)}: expected no such argument for {home}, which is no repository of the hub")
        compressor = cast(Compressor, load_compressor(cls, home, model, allow_regex))
        compressor._home, compressor._tokenizer = home, tokenizer
        return compressor


def check_base(losses: Mapping[str, float], base_frozen: bool) -> None:
    """Refuses the loss "kl" where the base model trains."""
    if "kl" in losses and not base_frozen:
        raise ValueError(
            "losses: expected 'kl' beside LoRA, as training without it changes the base model, got lora None"
        )
