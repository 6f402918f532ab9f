"""Compressor: the interface of all methods, from contexts to memories, losses and answers, and their files."""

from __future__ import annotations

from dataclasses import replace
from inspect import ismethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gistkit.common.checks import check_int
from gistkit.compress import decode as reading
from gistkit.compress import files, generation, memory_join, parts, plain_cache, texts, training
from gistkit.compress.adapters import Copies
from gistkit.compress.config import Config
from gistkit.compress.identity import Identity
from gistkit.compress.memory import Memory
from gistkit.compress.method import Method
from gistkit.compress.model import ModelMixin, SharedModel
from gistkit.compress.source import Source
from gistkit.compress.tokens import Rows, as_rows
from gistkit.hf.lora import adapter_config, unchanged_on_error

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


class Compressor(nn.Module, ModelMixin, Method):
    """A model with a method: `encode` makes memories of contexts, and text is read after them.

    Threads may share a compressor, and compressors may share a model, to encode, read and generate: one thread at a
    time runs a pass, and the others wait. Training is not thread-safe.

    Args:
        model: a transformers causal language model; all passes use its one copy of the weights.
        config: the method's arguments; they may be given by name instead.
    """

    # Of transformers' Trainer: losses are means over a batch.
    accepts_loss_kwargs = False

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
        self.identity = Identity(self, config.lora is None)
        self._tokenizer: Any = None
        # Whether token ids are also those of an encoder beside the model; None: not looked at yet.
        self.shares_tokens: bool | None = None
        # The folder that it was read from.
        self._home: Path | None = None
        # Tokens of the longest context that `forward` has trained on, also before it was saved; None: unknown.
        self.trained_length: int | None = None
        # As many parts of a longer context as were read together in training.
        self.trained_parts = 1
        # Those of its training's texts, such as "en"; None: unknown.
        self.languages: tuple[str, ...] | None = None
        self._parts: frozenset[str] = frozenset()
        self.options = config
        if self.end_token is not None:
            self.lm.first_token("end_token", self.end_token)
        self._source: tuple[Config, Source] | None = None
        self.compression_head: nn.Module | None = None
        if "compression" in self.loss_weights:
            self.add_compression_head()
        self.install()

    def __getattr__(self, name: str) -> Any:
        # Beside its modules and parameters it has the values of its config, without methods and classes.
        try:
            return super().__getattr__(name)
        except AttributeError:
            options = vars(self).get("options")
            if options is None or name.startswith("_") or name in self._parts or not hasattr(options, name):
                raise
            value = getattr(options, name)
            if ismethod(value) or isinstance(value, type):
                raise
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        options = vars(self).get("options")
        own = name.startswith("_") or hasattr(type(self), name) or isinstance(value, nn.Module | nn.Parameter)
        if options is not None and not own and name not in self._parts and hasattr(options, name):
            raise AttributeError(f"{name}: expected a setting to stay as it was given, got {value!r}")
        super().__setattr__(name, value)

    def install(self) -> None:
        """Puts the adapters of the config's roles into the model that encodes, and what trains beside it."""
        lora, options, lm = self.adapter_config(), self.options, self.encoder_lm
        training.check_base(self.loss_weights, lora is not None or lm is not self.lm)
        with unchanged_on_error(cast(Any, lm.model)):
            if lora is not None or self.trains_model:
                roles = None if lora is None else dict.fromkeys(options.roles, lora)
                lm.install(roles, options.copied, norms=options.copy_norms, by_role=self.adapts_some)
                self.copies = self.lm.copies
            parts = options.parts(self.embed)
        # A setting of a part's name, such as `soft_prompt`, says that there is one.
        self._parts = frozenset(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def adapter_config(self) -> LoraConfig | None:
        """The adapter of each of the config's roles; None: there is none."""
        model, options = cast(Any, self.encoder_lm.model), self.options
        return adapter_config(
            model, options.lora, options.maps, embedding_lora=options.embedding_lora, train_norms=options.train_norms
        )

    @property
    def source(self) -> Source:
        """The source that a readable memory has."""
        options, structure = self.options, self.lm.structure
        if self._source is None or self._source[0] is not options or self._source[1].structure != structure:
            width = 2 * sum(heads * head_dim for heads, head_dim in self.lm.head_shapes)
            shape = options.chunk, options.memory_tokens, structure, width
            self._source = options, Source(self.method, self.carrier, options.of_memory, *shape)
        return self._source[1]

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

        Methods in place read a context in parts, and join these, if it is longer than those that they were trained on:
        see the setting `part`.

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
        at_ratio, rows = self if ratio is None else self.at(ratio), self.contexts(input_ids, attention_mask)
        if budget is not None:
            if ratio is not None:
                raise ValueError(f"budget: expected none with ratio {ratio}, got {budget}")
            at_ratio = self.within(rows, check_int("budget", budget))
        if gradient and torch.is_grad_enabled():
            self.identity.forget()
        # Not inference mode, whose tensors no later graph could use.
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            memory, compressed = at_ratio.encode_contexts(rows)
        if self.trained_length is not None or self.languages is not None:
            training.warn_of_unlike(at_ratio, compressed)
        fingerprint, maker = self.fingerprints()
        return replace(memory, fingerprint=fingerprint, maker=maker, model=self.identity.model)

    def rows(self, name: str, ids: Any, attention_mask: Any = None, shortest: int = 0) -> Rows:
        """The user's token ids, checked and padded on the right."""
        return as_rows(name, ids, attention_mask, vocabulary=self.vocabulary, device=self.device, shortest=shortest)

    def contexts(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """`rows` of contexts; each row needs at least one token."""
        return self.rows("input_ids", input_ids, attention_mask, shortest=1)

    def encode_contexts(self, rows: Rows) -> tuple[Memory, Rows]:
        """The memory, with those contexts read in parts that are longer than `reach`; and what was compressed."""
        if (reach := self.reach) is not None and max(rows.lengths) > reach:
            return parts.encode_in_parts(self, rows)
        memory, _, compressed = self.compress_rows(rows)
        return memory, compressed

    def compress_rows(self, rows: Rows) -> tuple[Memory, Tensor | None, Rows]:
        """The memory, the hidden states [B, K, d] at the memory tokens or None, and the tokens that were compressed."""
        self.lm.refuse_foreign_checkpointing()
        # Where RoPE's frequencies depend on the length of a pass, that length is a row's own.
        if rows.batch_size > 1 and type(rows) is Rows and self.lm.changing_rope:
            memories, states, _ = zip(*map(self.compress_rows, rows.alone()), strict=True)
            hidden_states = None if None in states else pad_sequence([state[0] for state in states], batch_first=True)
            return memories[0].stack(memories), hidden_states, self.cut(rows)[0]
        rows, remainder = self.cut(rows)
        memory, hidden_states = self.encode_rows(rows)
        return replace(memory, rest=remainder or memory.rest), hidden_states, rows

    # Functions of a compressor in modules of their own.
    tokenizer = property(texts.tokenizer, texts.set_tokenizer)
    compress = texts.compress
    ask = texts.ask
    generate = generation.generate
    to_cache = plain_cache.to_cache
    folded = generation.folded
    decode = reading.decode
    read = reading.read
    reading_plan = reading.reading_plan
    check_readable = reading.check_readable
    join = memory_join.join
    encode_parts = parts.encode_parts
    forward = training.forward
    set_losses = training.set_losses
    add_compression_head = training.add_compression_head
    check_head = training.check_head
    trainable = training.trainable
    print_trainable_parameters = training.print_trainable_parameters
    parameter_groups = training.parameter_groups
    save_pretrained = files.save_pretrained
    push_to_hub = files.push_to_hub
    output_embedding = property(training.output_embedding)

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: PreTrainedModel | None = None, **options: Any) -> Self:
        """Loads a compressor that `save_pretrained` saved; see `gistkit.compress.files.from_pretrained`."""
        return files.from_pretrained(cls, folder, model, **options)

    @property
    def training(self) -> bool:
        """The model's mode, which copies of `at` share."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        # `train` and `eval` set it in the model too.
        pass

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, as for any module; True also frees what answers have cached."""
        if mode:
            self.lm.release()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Weights move, or change their dtype.
        self.lm.release()
        with self.identity.moving():
            return super()._apply(fn, recurse)
