"""Compressor: the one interface of all methods, from contexts to memories, losses and answers, and its files."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from gistkit import hf
from gistkit._checks import IGNORE, POSITIONS, placed, whole
from gistkit._trained import find
from gistkit.compress.files import download, load_compressor, load_tokenizer, push_compressor, save_compressor
from gistkit.compress.generation import ask, generate, to_cache
from gistkit.compress.losses import (
    HEAD,
    CompressionHead,
    JointHead,
    check_losses,
    divergence_loss,
    segment_targets,
    token_loss,
)
from gistkit.compress.memory import TASKS, Memory, Source, Task, check_memory
from gistkit.compress.memory_join import join
from gistkit.compress.model import Adapters, Copies, SharedModel, Use
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.tokens import (
    QUESTION,
    Rows,
    as_rows,
    check_rows,
    join_rows,
    label_rows,
    pad,
    text_ids,
    texts_of,
)
from gistkit.hf.attach import ModuleSnapshot
from gistkit.hf.cache import MemoryCache
from gistkit.hf.fingerprint import plain_tensors
from gistkit.hf.lora import embedding_scale
from gistkit.layouts import Plan

if TYPE_CHECKING:
    from peft import LoraConfig


def embedding_statistics(embed: nn.Embedding) -> tuple[Tensor, Tensor]:
    """Mean [d] and spread, a scalar, of the vocabulary's embeddings as the first layer reads them, fp32."""
    table = embed.weight.detach().float() * embedding_scale(embed)
    return table.mean(0), table.std()


def draw_like(embed: nn.Embedding, rows: int) -> nn.Parameter:
    """New embeddings [rows, d] with the mean and spread of those of the vocabulary, fp32."""
    mean, spread = embedding_statistics(embed)
    return nn.Parameter(mean + spread * torch.randn(rows, len(mean), device=mean.device))


class _Weights(NamedTuple):
    """The base model's parameters, the compressor's own parameters by name, and a snapshot of the modules with both."""

    snapshot: ModuleSnapshot
    base_weights: list[nn.Parameter]
    own_weights: dict[str, nn.Parameter]


class Compressor(nn.Module, ABC):
    """What all methods share: losses from one compression, generation, joining, and their files.

    Threads may share a compressor, and compressors a model, to encode, read and generate: one thread at a time is in a
    pass, and the others wait. Training is no such use: its backward pass and rounded weights take no turn.

    Args:
        model: a transformers causal language model; its one copy of the weights serves all passes.
        chunk, memory_tokens: each chunk of `chunk` context tokens has `memory_tokens` memory tokens; so has a shorter
            last one.
        layout: see `Source`.
        reader: the role whose adapter the decoder runs with; None: no adapter.
        window: only the first `window` tokens of a longer context are compressed. None: all of them are.
        losses: what `forward` returns, names or {name: weight}: "ae" (reconstruct the context), "lm" (continue it),
            "compression" (each memory token predicts its own segment), "qa" (answer a question about it), "kl" (answer
            as the base model does when it reads the whole context).
        end_token: token id that ends the reconstruction of a context, such as the tokenizer's eos. None: no token.
        joint_head: the compression loss has one map to all logits of a segment, in place of one map for each offset.
        settings: the method's own keyword arguments by name; JSON values, which `from_pretrained` reads back.
    """

    method: ClassVar[str]
    carrier: ClassVar[str]
    shared_arguments: ClassVar[frozenset[str]] = frozenset()
    """Keyword arguments that a method takes as `**` of its constructor."""
    needs_training: ClassVar[bool] = True
    """Whether a memory is noise to a model before the compressor was trained."""
    encoder_predicts_first: ClassVar[bool] = False
    """Whether `Memory.last`, which has read the whole context, predicts a continuation's first token."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int,
        memory_tokens: int,
        layout: str,
        losses: Iterable[str] | Mapping[str, float],
        reader: str | None = None,
        window: int | None = None,
        end_token: int | None = None,
        joint_head: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        loss_weights = check_losses(losses)
        super().__init__()
        self.lm = SharedModel(model)
        if self.carrier == "kv" and self.lm.traits.keys is not None:
            raise TypeError(
                f"model: expected one that reads keys and values of an earlier pass, as {self.method} does, got "
                f"{type(model).__name__}: {self.lm.traits.keys}"
            )
        # Registered here, because parameters have its name in checkpoints.
        self.model = model
        self.copies: Copies | None = None
        self._fingerprint: tuple[Any, str] | None = None
        self._own_fingerprint: tuple[Any, str] | None = None
        self._identity: dict[str, Any] | None = None
        self._cached_weights: _Weights | None = None
        self._tokenizer: Any = None
        # Where it was read from.
        self._home: Path | None = None
        self.chunk, self.memory_tokens, self.layout = chunk, memory_tokens, layout
        self._check_window(window)
        self.window = window
        # Tokens of the longest context that `forward` has trained on, also before it was saved; None: unknown.
        self.trained_length: int | None = None
        self.reader = reader
        self.loss_weights = loss_weights
        self._settings = dict(settings or {})
        self.end_token = None if end_token is None else self.lm.first_token("end_token", end_token)
        self.joint_head = joint_head
        self.compression_head: CompressionHead | JointHead | None = None
        if "compression" in loss_weights:
            self.add_compression_head()

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
    def adapters(self) -> Adapters | None:
        """The compressor's LoRA adapters by role; None where the model's own weights train."""
        return self.lm.adapters

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

    @abstractmethod
    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor | None]:
        """The memory of rows that fit the window, and the hidden states [B, K, d] at the learned memory tokens.

        They are None where the compression loss, which reads them, is none of the losses and they were not kept.
        """

    @abstractmethod
    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0 or 1, d]: the task token between memory and text; without one, `Memory.last` predicts the text."""

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

    @property
    def ratio(self) -> float:
        """Context tokens a memory token stands for, L / M."""
        return self.chunk / self.memory_tokens

    def fingerprint(self) -> str:
        """The base model's fingerprint, computed again only when its weights have changed."""
        return self.fingerprints()[0]

    def known_as(self, fingerprint: str) -> None:
        """Gives the base model's weights, as they now are, a fingerprint: that of another dtype's copy of them."""
        self._fingerprint = _versions(self._weights().base_weights), fingerprint
        self._identity = hf.identity(self.model)

    def own_fingerprint(self) -> str:
        """The fingerprint of the compressor's own weights, computed again only when they have changed."""
        return self.fingerprints()[1]

    def fingerprints(self) -> tuple[str, str]:
        """`fingerprint` and `own_fingerprint`, from one look at the weights."""
        with self.lm.turn():
            weights, (base_version, own_version) = self._weights(), self.versions(anywhere=False)
            if self._fingerprint is None or self._fingerprint[0] != base_version:
                self._fingerprint = base_version, hf.fingerprint(self.model)
                self._identity = hf.identity(self.model)
            if self._own_fingerprint is None or self._own_fingerprint[0] != own_version:
                self._own_fingerprint = own_version, hf.digest(weights.own_weights.items())
            return self._fingerprint[1], self._own_fingerprint[1]

    def _forget(self) -> None:
        """Forgets the fingerprints of what trains: a step follows, which a GPU's host could not see."""
        self._own_fingerprint = None
        if self.adapters is None:
            self._fingerprint = None

    def versions(self, *, anywhere: bool = True) -> tuple[Any, Any]:
        """What changes with the base model's weights, and with the compressor's own; a GPU is waited for `anywhere`."""
        # Another thread may have the model without its upper layers.
        with self.lm.turn():
            weights = self._weights()
            parts = weights.base_weights, weights.own_weights.values()
            base, own = (_versions(part, anywhere=anywhere) for part in parts)
            return base, own

    def _weights(self) -> _Weights:
        """The base model's weights and the compressor's own, collected again only when a parameter is replaced."""
        weights = self._cached_weights
        if weights is None or not weights.snapshot.unchanged:
            base_weights, own_weights = [], {}
            for name, parameter in self.named_parameters():
                adapter = self.adapters is not None and self.adapters.owns(name)
                if self.adapters is not None and adapter:
                    own_weights[self.adapters.plain(name)] = parameter
                elif name.startswith("model."):
                    base_weights.append(parameter)
                else:
                    own_weights[name] = parameter
            weights = self._cached_weights = _Weights(ModuleSnapshot(self.modules()), base_weights, own_weights)
        return weights

    @property
    def source(self) -> Source:
        """What a readable memory was made with."""
        width = 2 * sum(heads * head_dim for heads, head_dim in self.lm.head_shapes)
        return Source(self.method, self.carrier, self.layout, self.chunk, self.memory_tokens, self.lm.structure, width)

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
            self._forget()
        # Not inference mode, whose tensors no later graph could use.
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            memory, _, compressed = self.compress_rows(self.contexts(input_ids, attention_mask))
        if self.trained_length is not None and max(compressed.lengths) > self.trained_length:
            warnings.warn(
                f"input_ids: expected at most {self.trained_length} tokens, as the longest context that the compressor "
                f"was trained on has, got {max(compressed.lengths)}: answers from its memory may be worse",
                stacklevel=2,
            )
        fingerprint, maker = self.fingerprints()
        return replace(memory, fingerprint=fingerprint, maker=maker, model=self._identity)

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

    def decode(
        self,
        memory: Memory,
        task: Task,
        input_ids: Any,
        attention_mask: Any = None,
    ) -> Tensor:
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
        check_memory(memory)
        check_rows("input_ids", rows, memory.batch_size)
        remainder = pad(memory.rest if task != "ae" else ((),) * memory.batch_size, self.device)
        if plan is None:
            plan = self.reading_plan(memory, task, (remainder, rows))
        texts = [self.lm.embedded(self.reader, part.ids) for part in (remainder, rows)]
        inputs = torch.cat([self.task_embedding(task, memory), *texts], 1)
        tokens, skip = inputs.shape[1], 0
        if memory.embeddings is not None:
            skip = memory.num_tokens
            inputs = torch.cat([memory.embeddings.to(inputs.dtype), inputs], 1)
        hidden_states = inputs
        if inputs.shape[1]:
            bias: Any = self.key_biases(memory)
            if memory.key_bias is not None and torch.is_grad_enabled():
                # The text's keys have none. Without gradients it is zeros.
                bias = F.pad(memory.key_bias, (0, inputs.shape[1]))[:, None]
            out = self.lm.run(self.reader, inputs_embeds=inputs, plan=plan, memory=memory.layers, key_bias=bias)
            hidden_states = out.last_hidden_state[:, skip:]
        if tokens == remainder.ids.shape[1] + rows.ids.shape[1]:
            hidden_states = torch.cat([self.last_of(memory)[:, None].to(hidden_states.dtype), hidden_states], 1)
        if not remainder.ids.shape[1]:
            return hidden_states
        last = placed(remainder.lengths, hidden_states.device)[:, None, None]
        return torch.cat([hidden_states.take_along_dim(last, 1), hidden_states[:, 1 + remainder.ids.shape[1] :]], 1)

    def reading_plan(self, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
        """The plan of [memory][task token][text]...; memory tokens that are cached keys have no row of their own.

        Errors about the length of the text name the argument `name`.
        """
        if task not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
        self.check_readable(memory)
        self.rows("memory", memory.rest)
        cached = self.carrier == "kv"
        ordinals, text_ordinals = self.ordinals(memory)
        tasks = self.task_embedding(task, memory).shape[1]
        reading = tuple(
            ReadingRow(
                memory.lengths[row],
                # Cached keys are rotated already.
                b"" if cached else memory.positions[row].numpy().tobytes(),
                ordinals[row].numpy().tobytes(),
                0 if task == "ae" and memory.source.consistent else memory.starts[row],
                text_ordinals[row],
                (tasks, *(text.lengths[row] for text in texts)),
            )
            for row in range(memory.batch_size)
        )
        self.lm.check_positions(name, max(row.start + sum(row.text) - 1 for row in reading))
        widths = (tasks, *(text.ids.shape[1] for text in texts))
        return decoder_plan(reading, memory.num_tokens, widths, cached, self.lm.windows, str(self.device))

    def last_of(self, memory: Memory) -> Tensor:
        """`Memory.last`; a ValueError if the memory has none."""
        if memory.last is None:
            raise ValueError("memory: expected one with the output that predicts what follows it, got one without")
        return memory.last

    def check_readable(self, memory: Memory) -> None:
        """Refuses a memory of another method, shape or model, or on another device."""
        if memory.source != self.source:
            got, expected = memory.differing(self.source, hf.identity(self.model))
            raise ValueError(f"memory: expected one made with {expected}, got one made with {got}")
        memory.check_shapes(self.lm.head_shapes, self.lm.width)
        if memory.fingerprint is not None and memory.fingerprint != self.fingerprint():
            got, expected = hf.differing(memory.model, hf.identity(self.model))
            raise ValueError(
                f"memory: expected one of the base model {expected}, got one of {got}: "
                "a model of the same shape with other weights"
            )
        if memory.maker is not None and memory.maker != self.own_fingerprint():
            warnings.warn(
                "memory: expected one that this compressor made, got one of another compressor, or of this one before "
                "it was trained further",
                stacklevel=3,
            )
        if memory.device != self.device:
            raise ValueError(
                f"memory: expected one on {self.device}, got one on {memory.device}; use memory.to(device)"
            )

    @property
    @abstractmethod
    def title(self) -> str:
        """The name in tables, such as FiveHundredX EPL 5x."""

    def add_compression_head(self) -> None:
        """Gives the compressor the map that the compression loss trains, untrained."""
        width, offsets = self.lm.width, -(-self.chunk // self.memory_tokens)
        head = JointHead(width, offsets, self.vocabulary) if self.joint_head else CompressionHead(width, offsets)
        self.compression_head = head.to(self.device)

    def set_losses(self, losses: Iterable[str] | Mapping[str, float]) -> None:
        """Changes what `forward` returns; the compression loss needs a compressor that was made with it."""
        loss_weights = check_losses(losses)
        self._check_base(loss_weights, self.adapters is not None)
        if "compression" in loss_weights and self.compression_head is None:
            raise ValueError(
                "losses: expected no 'compression' for a compressor that was made without it, got "
                + ", ".join(loss_weights)
            )
        self.loss_weights = loss_weights

    def set_window(self, window: int | None) -> None:
        """Changes how many tokens of a longer context are compressed; None: all of them.

        Raises:
            ValueError: if the method has no window, or that is out of range.
        """
        if "window" not in self._settings:
            raise ValueError(f"window: expected none for {self.method}, which has no window, got {window}")
        self._check_window(window)
        self.window = self._settings["window"] = window

    def _check_window(self, window: int | None) -> None:
        if window is not None:
            whole("window", window, high=POSITIONS)

    def install(self, lora: Mapping[str, LoraConfig] | None, copies: str | None = None, *, norms: bool = False) -> None:
        """See `SharedModel.install`."""
        self._check_base(self.loss_weights, lora is not None)
        self.lm.install(lora, copies, norms=norms)
        self.copies = self.lm.copies

    @staticmethod
    def _check_base(losses: Mapping[str, float], base_frozen: bool) -> None:
        if "kl" in losses and not base_frozen:
            raise ValueError(
                "losses: expected 'kl' beside LoRA, as training without it changes the base model, got lora None"
            )

    @classmethod
    def arguments(cls) -> set[str]:
        """The names of the keyword arguments of the constructor."""
        parameters = inspect.signature(cls).parameters.values()
        keywords = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        return keywords | cls.shared_arguments

    @classmethod
    @abstractmethod
    def roles(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The roles that have adapters, in a compressor with these settings and with LoRA."""

    @classmethod
    def own_shapes(cls, settings: Mapping[str, Any], width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
        """Shapes of those of its own tensors, by name, whose sizes the settings determine.

        HEAD is among them where the method has the compression loss, whether or not it is one of the losses.

        Args:
            settings: as the property has them.
            width, vocabulary: of the model's input embeddings.
        """
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that the compressor was made with, except `lora`; JSON values."""
        return self._settings | {"losses": dict(self.loss_weights), "end_token": self.end_token}

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
        self._thaw()
        if self.training and torch.is_grad_enabled():
            self._forget()
        rows = self.contexts(input_ids, attention_mask)
        answers = next((name for name in ("qa", "kl") if name in self.loss_weights), "")
        labels = {"continuation_ids": ("lm", continuation_ids), "question_ids": (answers, question_ids),
                 "answer_ids": (answers, answer_ids)}  # fmt: skip
        texts = {
            name: self._text(name, *value, rows) for name, value in labels.items() if value[0] in self.loss_weights
        }
        losses: dict[str, Tensor] = {}
        with self.lm.attached():
            memory, hidden_states, compressed = self.compress_rows(rows)
            if self.training:
                self.trained_length = max(self.trained_length or 0, *compressed.lengths)
            for name in self.loss_weights:
                if name == "compression" and self.compression_head is not None:
                    if hidden_states is None:
                        raise TypeError(
                            "encode_rows: expected hidden states, which the loss compression reads, got None"
                        )
                    targets = self._segments(compressed)
                    losses[name] = self.compression_head(
                        self.lm.readout(hidden_states), targets=targets, **self.output_embedding
                    )
                elif name == "ae":
                    losses[name] = self._loss(memory, "ae", self._with_end_token(compressed))
                elif name == "lm":
                    losses[name] = self._loss(memory, "lm", texts["continuation_ids"])
            if answers:
                losses |= self._answer_losses(memory, rows, texts["question_ids"], texts["answer_ids"])
        weighted = [weight * losses[name] for name, weight in self.loss_weights.items()]
        losses["loss"] = torch.stack(weighted).sum() / sum(self.loss_weights.values())
        return losses

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that train, by name, without other adapters in the model."""
        self._thaw()
        for name, parameter in self.named_parameters():
            belongs = "lora_" not in name if self.adapters is None else self.adapters.owns(name)
            if name == HEAD and "compression" not in self.loss_weights:
                continue
            if parameter.requires_grad and (belongs or not name.startswith("model.")):
                yield name, parameter

    def print_trainable_parameters(self) -> None:
        """Prints how many parameters train, of how many, in one line as PEFT's models do."""
        trained = {id(parameter): parameter.numel() for _, parameter in self.trainable()}
        total = sum(parameter.numel() for parameter in self.parameters())
        count = sum(trained.values())
        print(f"trainable params: {count:,} || all params: {total:,} || trainable%: {100 * count / total:.4f}")

    def _thaw(self) -> None:
        """Undoes what PEFT's `set_adapter` and `disable_adapter` do for a user's adapter: they freeze all others."""
        if self.adapters is None or not self.adapters.frozen:
            return
        # Who froze the compressor's own parameters too meant all of it.
        if any(p.requires_grad for name, p in self.named_parameters() if not name.startswith("model.")):
            self.adapters.thaw()

    def parameter_groups(self, learning_rate: float, memory_factor: float = 3.0) -> list[dict[str, Any]]:
        """The parameters as an optimizer takes them; those of the gists have `memory_factor` times the learning rate.

        GistPool, Section 5.2: parameters that compress need a higher learning rate.
        """
        if not memory_factor > 0:
            raise ValueError(f"memory_factor: expected a number > 0, got {memory_factor}")
        gist_parameters: list[nn.Parameter] = []
        text_parameters: list[nn.Parameter] = []
        for name, parameter in self.trainable():
            (gist_parameters if self.of_gists(name) else text_parameters).append(parameter)
        groups = [
            {"params": text_parameters, "lr": learning_rate},
            {"params": gist_parameters, "lr": learning_rate * memory_factor},
        ]
        return [group for group in groups if group["params"]]

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

    def _text(self, name: str, task: str, ids: Any, contexts: Rows) -> Rows:
        if ids is None:
            raise ValueError(f"{name}: expected int64 [B, t] for the {task} loss, got None")
        rows = label_rows(name, ids, vocabulary=self.vocabulary, device=self.device)
        if rows.batch_size != contexts.batch_size:
            raise ValueError(f"{name}: expected {contexts.batch_size} rows as input_ids has, got {rows.batch_size}")
        if not rows.ids.shape[1] and name != "question_ids":
            raise ValueError(f"{name}: expected tokens to predict, got empty rows")
        return rows

    def _with_end_token(self, rows: Rows) -> Rows:
        if self.end_token is None:
            return rows
        return join_rows(rows, pad([[self.end_token]] * rows.batch_size, rows.ids.device))

    @property
    def output_embedding(self) -> dict[str, Any]:
        """The output embedding as arguments of the losses."""
        return {"weight": self.lm.head.weight, "bias": self.lm.head.bias, "softcap": self.lm.softcap}

    def _segments(self, compressed: Rows) -> Tensor:
        """The context tokens that the compression loss predicts from each memory token."""
        return segment_targets(compressed.ids, self.chunk, self.memory_tokens, compressed.lengths)

    def _loss(self, memory: Memory, task: Task, text: Rows) -> Tensor:
        """Mean loss of the tokens of a text after the memory; a row's last token predicts nothing."""
        hidden_states = self.read(memory, task, _but_last(text))
        targets = text.ids.where(text.valid, IGNORE)
        return token_loss(self.lm.readout(hidden_states), targets=targets, **self.output_embedding)

    def _answer_losses(self, memory: Memory, contexts: Rows, question: Rows, answer: Rows) -> dict[str, Tensor]:
        """Those of the losses "qa" and "kl" that the compressor has, over the tokens of the answers."""
        text = join_rows(question, answer)
        hidden_states = self.read(memory, "qa", _but_last(text))
        columns = torch.arange(text.ids.shape[1], device=text.ids.device)
        in_answer = text.valid & (columns >= placed(question.lengths, text.ids.device)[:, None])
        losses = {}
        if "qa" in self.loss_weights:
            targets = text.ids.where(in_answer, IGNORE)
            losses["qa"] = token_loss(self.lm.readout(hidden_states), targets=targets, **self.output_embedding)
        if "kl" in self.loss_weights:
            teacher = self._teacher_states(self.uncompressed(contexts), text)
            student_and_teacher = (self.lm.readout(states[in_answer]) for states in (hidden_states, teacher))
            losses["kl"] = divergence_loss(*student_and_teacher, **self.output_embedding)
        return losses

    @torch.no_grad()
    def _teacher_states(self, contexts: Rows, text: Rows) -> Tensor:
        """Hidden states [B, T, d] before each token of `text`, of the base model on the whole context."""
        rows = _but_last(join_rows(contexts, text))
        plan = self.lm.causal_plan(rows.ids.shape[1])
        hidden_states = self.lm.run(None, inputs_embeds=self.embed(rows.ids), plan=plan).last_hidden_state
        start = placed(contexts.lengths, hidden_states.device)[:, None] - 1
        index = start + torch.arange(text.ids.shape[1], device=hidden_states.device)
        return hidden_states.take_along_dim(index.clamp(max=hidden_states.shape[1] - 1)[..., None], 1)

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them whole."""
        return contexts


def _but_last(rows: Rows) -> Rows:
    return rows.columns(slice(-1), tuple(max(length - 1, 0) for length in rows.lengths))


def _versions(weights: Iterable[Tensor], *, anywhere: bool = False) -> tuple[Any, ...]:
    """What changes with the weights: where each lies, its version and, on the CPU or `anywhere`, one of its values.

    Changes of whole weights through `.data`, as fused optimizers and some loaders make them, show in the values alone.
    A change of other single values through `.data`, such as one row of embeddings, is not seen, nor any on a GPU, whose
    values the host would have to wait for; `forward` sees that a step follows.
    """
    values: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    places = []
    # A loop of every pass: most weights have no parts.
    plain = (nn.Parameter, Tensor)
    for weight in (part for one in weights for part in ((one,) if type(one) in plain else plain_tensors(one))):
        # Weights made in inference mode have no version.
        places.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
        if weight.numel() and (weight.is_cpu or (anywhere and not weight.is_meta)):
            inside = tuple(size * 5 // 8 for size in weight.shape)
            values.setdefault((weight.device, weight.dtype), []).append(weight.detach()[inside])
    return (*places, *(tuple(torch.stack(some).tolist()) for some in values.values()))
