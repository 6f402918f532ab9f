"""LanguageModel: a compressor as a language model that sees recent tokens uncompressed and its past compressed.

It reads a text in one pass, or token by token in a `Stream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from gistkit import hf
from gistkit.common.checks import IGNORE, placed
from gistkit.compress.adapters import Use
from gistkit.compress.generation import Loop, configured, padded_at_start
from gistkit.compress.losses import token_loss
from gistkit.compress.methods.in_place import TEXT, InPlace
from gistkit.compress.reading.cache import StreamCache
from gistkit.compress.tokens import Rows
from gistkit.layouts import Plan
from gistkit.layouts.dodo import check_segment


class LanguageModel(ABC):
    """A language model that sees its recent tokens, and those states of its past that a subclass keeps.

    All parameters are the compressor's.

    Args:
        compressor: its model, adapters and BOS are used.
        tau, segment: see `gistkit.layouts.dodo`.
    """

    role: ClassVar[str | None] = TEXT
    """The role of its tokens."""
    stream: ClassVar[type[Stream]]
    """What reads on token by token."""

    def __init__(self, compressor: InPlace, tau: int, segment: int) -> None:
        self.compressor = compressor
        self.tau, self.segment = check_segment(tau, segment)

    @property
    def title(self) -> str:
        """The name in tables."""
        return f"{self.compressor.title}, tau {self.tau}"

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the losses besides parameters and text; JSON values."""
        return self.compressor.settings | {"tau": self.tau, "segment": self.segment}

    def first(self, position: int) -> int:
        """The first position that a token at `position` sees uncompressed; the same for all tokens of a segment."""
        return max(0, position // self.segment * self.segment - (self.tau - self.segment))

    @abstractmethod
    def plan(self, seen: Any) -> Plan:
        """The plan of one pass over so many tokens, BOS first."""

    def embedded(self, rows: Rows) -> Tensor:
        """Input embeddings [B, N, d] of rows with BOS."""
        return self.compressor.lm.embedded(self.role, rows.ids)

    def extend(self, count: int) -> Any:
        """What adds keys to those of so many tokens in every layer, see `gistkit.hf.attach`; None: nothing."""
        return None

    def hidden(self, rows: Rows, *, keep: hf.KeptKeys | None = None) -> Tensor:
        """Hidden states [B, N, d] at each token of rows with BOS, from one pass; `keep` as in `gistkit.hf.attach`."""
        lm, count = self.compressor.lm, rows.ids.shape[1]
        with lm.attached():
            reading: dict[str, Any] = {"plan": self.plan(count), "keep": keep, "extend": self.extend(count)}
            return cast(Tensor, lm.run(self.role, inputs_embeds=self.embedded(rows), **reading).last_hidden_state)

    def states(self, rows: Rows) -> Tensor:
        """int64 [B, N]: how many states each token of rows with BOS sees in a layer, its own included; 0 on padding."""
        return keys_seen(self.plan(rows.ids.shape[1])).where(rows.valid, 0)

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> dict[str, Tensor]:
        """{"loss": nats a token} of texts, each token after BOS predicted from those before it (Equation 11).

        Args:
            input_ids, attention_mask: as in `Compressor.encode`.
        """
        compressor = self.compressor
        compressor.lm.refuse_foreign_checkpointing()
        if torch.is_grad_enabled():
            compressor.identity.forget()
        if compressor.training and compressor.train_ratios:
            raise ValueError(
                "train_ratios: expected none to train a language model, which uses the compressor's own ratio, got "
                f"{compressor.train_ratios}"
            )
        rows = self.rows(input_ids, attention_mask)
        hidden_states = self.hidden(rows)
        targets = rows.ids.where(rows.valid, IGNORE)[:, 1:]
        return {
            "loss": token_loss(
                compressor.lm.readout(hidden_states[:, :-1]), targets=targets, **compressor.output_embedding
            )
        }

    def start(self, input_ids: Any, attention_mask: Any = None) -> Stream:
        """Reads texts in one pass and returns a `Stream`, which reads on token by token."""
        return self.stream(self, self.rows(input_ids, attention_mask))

    @torch.no_grad()
    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        stop_tokens: int | Iterable[int] | None = None,
        pad_token: int | None = None,
        streamer: BaseStreamer | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Any:
        """Tokens int64 [B, n] that follow the texts; the cache drops keys that no token sees any more.

        Args:
            input_ids, attention_mask: texts, as in `Compressor.encode`.
            others: as in `gistkit.compress.generation.generate`, without beams and drafts.
        """
        lm, texts = self.compressor.lm, self.compressor.contexts(input_ids, attention_mask)
        config, options = configured(lm, texts.ids.shape[1], generation_config, stop_tokens, pad_token, options)
        with lm.attached(), lm.without_checkpointing():
            continuation = _Continuation(self.start(texts.ids, texts.valid))
            return continuation.write(padded_at_start(texts, config), config, streamer, generator, options)

    def rows(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """A user's texts, checked, with BOS before them; each has at least one other token."""
        compressor = self.compressor
        rows = compressor.with_bos(compressor.contexts(input_ids, attention_mask))
        if compressor.lm.changing_rope and len({*rows.lengths}) > 1:
            raise ValueError(
                "input_ids: expected rows of one length, on which the frequencies of the model's RoPE depend, got "
                f"{min(rows.lengths)} to {max(rows.lengths)} tokens with the first one"
            )
        compressor.lm.check_positions("input_ids", max(rows.lengths) - 1)
        return rows


def keys_seen(plan: Plan) -> Tensor:
    """int64 [B, Nq]: how many keys each query of a plan sees."""
    return (plan.spans[..., 1] - plan.spans[..., 0]).sum(-1).long()


class Stream(ABC):
    """Texts that a `LanguageModel` reads on token by token, with a cache of the keys that it still sees.

    Visibility and positions are those of one pass over the whole text. RoPE types that depend on a text's length rotate
    each token by the length so far. A loop of steps is faster inside `hf.attach(model)`; otherwise each step opens it.

    Args:
        reader: its parameters and sizes are used.
        rows: texts with BOS, which are read in one pass.
    """

    last: Tensor
    """Hidden states [B, d] of each row's last token."""

    @torch.no_grad()
    def __init__(self, reader: LanguageModel, rows: Rows) -> None:
        self.reader = reader
        self.ends = list(rows.lengths)
        hidden_states, self._cache = self._first_pass(rows)
        ends = placed(self.ends, hidden_states.device)[:, None, None] - 1
        self.last = hidden_states.take_along_dim(ends, 1)[:, 0]

    @property
    def states(self) -> tuple[int, ...]:
        """Keys of each row in the cache of every layer; a mean is one, and keys that wait to be dropped count."""
        return self._cache.counts

    @property
    def nbytes(self) -> int:
        """Bytes of all cached keys and values."""
        return self._cache.nbytes

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one token a row, int64 [B]; returns their hidden states [B, d] and keeps them as `last`."""
        compressor = self.reader.compressor
        if not isinstance(tokens, Tensor) or tokens.shape != (len(self.ends),):
            description = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens: expected one for each of {len(self.ends)} rows, got {description}")
        with compressor.lm.attached(), compressor.lm.without_checkpointing():
            return self.read_on(compressor.rows("tokens", tokens[:, None]).ids[:, 0])

    @torch.no_grad()
    def read_on(self, tokens: Tensor) -> Tensor:
        """`step` of checked tokens, inside `attach` and without gradient checkpointing."""
        compressor = self.reader.compressor
        compressor.lm.check_positions("tokens", max(self.ends))
        inputs = compressor.embed(tokens[:, None])
        try:
            stays = self._stays(tokens, inputs)
            self._cache.clear(self.ends)
            plan = self._cache.plan(self.ends, compressor.lm.windows)
            cache = self._cache
            use = self._roles(stays)
            # Open for both, so that adapters are switched once a token.
            with compressor.using(use):
                inputs = compressor.lm.embedded(use, tokens[:, None])
                out = compressor.lm.run(use, inputs_embeds=inputs, plan=plan, cache=cache.cache, keep=cache.keeper())
            self._cache.add(self.ends, stays)
        except BaseException:
            self._take_back()
            raise
        self.ends = [end + 1 for end in self.ends]
        self.last = out.last_hidden_state[:, 0]
        return self.last

    def _take_back(self) -> None:
        """Drops what a step that was broken off has left in some layers, so that the stream can read on."""
        self._cache.take_back(self.ends)

    def _recent(self) -> list[list[int]]:
        """Positions of BOS and of the tokens that each row's next token sees uncompressed."""
        return [[0, *range(max(1, self.reader.first(end)), end)] for end in self.ends]

    @abstractmethod
    def _first_pass(self, rows: Rows) -> tuple[Tensor, StreamCache]:
        """Hidden states [B, N, d] of the texts, and the cache of their keys."""

    def _stays(self, tokens: Tensor, inputs: Tensor) -> Sequence[bool]:
        """Whether each row's next token, with input embeddings [B, 1, d], stays for good."""
        return [False] * len(self.ends)

    def _roles(self, stays: Sequence[bool]) -> Use:
        """The role of each row's next token."""
        return self.reader.role


class _Continuation(Loop):
    """The texts of a stream and the new tokens after them."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.reader.compressor.lm)
        self._stream, self._begun = stream, False

    def states(self, input_ids: Tensor) -> Tensor:
        if self._begun:
            # Rows that have ended are fed any token.
            self._stream.read_on(input_ids[:, -1].clamp(0, self.lm.vocabulary - 1))
        self._begun = True
        return self._stream.last[:, None]
