"""Stream: texts read token by token, of which a cache keeps what can still be seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gistkit import hf
from gistkit.compress.generation import Streamer, chooser, stop_ids, write
from gistkit.compress.held import Held
from gistkit.compress.tokens import Rows

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use
    from gistkit.compress.language import LanguageModel


class Stream(ABC):
    """Texts that a `LanguageModel` reads on token by token, with a cache of what it still sees.

    What a token sees, and its position, are those of one pass over the whole text; RoPE types that go by a text's
    length rotate each token by the length so far. A loop of steps is faster inside `hf.attach(model)`, which each step
    opens otherwise.

    Args:
        reader: whose parameters and sizes serve.
        read: texts behind BOS, which are read in one pass.
    """

    last: Tensor
    """Hidden states [B, d] of each row's last token."""

    @torch.no_grad()
    def __init__(self, reader: LanguageModel, read: Rows) -> None:
        self.reader = reader
        self.ends = list(read.lengths)
        hidden, self._held = self._read(read)
        ends = torch.tensor(self.ends, device=hidden.device)[:, None, None] - 1
        self.last = hidden.take_along_dim(ends, 1)[:, 0]

    @property
    def states(self) -> tuple[int, ...]:
        """Keys of each row that are held in every layer; a mean is one, and those that wait to be dropped count."""
        return self._held.counts

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held."""
        return self._held.nbytes

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one token a row, int64 [B], and returns its hidden states [B, d], which `last` is from then on."""
        its = self.reader.compressor
        if not isinstance(tokens, Tensor) or tokens.shape != (len(self.ends),):
            got = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens: expected one for each of {len(self.ends)} rows, got {got}")
        with hf.attach(its.model), its.without_checkpointing():
            return self.read_on(its.rows("tokens", tokens[:, None]).ids[:, 0])

    @torch.no_grad()
    def read_on(self, tokens: Tensor) -> Tensor:
        """`step` of checked tokens, inside `attach` and without gradient checkpointing."""
        its = self.reader.compressor
        its.check_positions("tokens", max(self.ends))
        inputs = its.embed(tokens[:, None])
        chosen = self._chosen(tokens, inputs)
        self._held.clear(self.ends)
        plan = self._held.plan(self.ends, its.windows)
        out = its.run(self._served(chosen), inputs_embeds=inputs, plan=plan, past_key_values=self._held.cache)
        self._held.add(self.ends, chosen)
        self.ends = [end + 1 for end in self.ends]
        self.last = out.last_hidden_state[:, 0]
        return self.last

    def _recent(self) -> list[list[int]]:
        """Positions of BOS and of the tokens of each row that its next token sees as they are."""
        return [[0, *range(max(1, self.reader.first(end)), end)] for end in self.ends]

    @abstractmethod
    def _read(self, read: Rows) -> tuple[Tensor, Held]:
        """Hidden states [B, N, d] of the texts, and what is held of them."""

    def _chosen(self, tokens: Tensor, inputs: Tensor) -> Sequence[bool]:
        """Which rows' next tokens, with input embeddings [B, 1, d], stay for good."""
        return [False] * len(self.ends)

    @abstractmethod
    def _served(self, chosen: Sequence[bool]) -> Use:
        """The role of each row's next token."""


@torch.no_grad()
def generate(
    reader: LanguageModel,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int = 256,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: int | Iterable[int] = (),
    pad_token: int = 0,
    streamer: Streamer | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens int64 [B, n] that follow the texts, n <= max_new_tokens; the cache drops what is not seen any more.

    Args:
        input_ids, attention_mask: texts, as in `Compressor.encode`.
        others: as in `gistkit.compress.generation.generate`.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens!r}")
    choose = chooser(do_sample, temperature, top_k, top_p, generator)
    stops, its = stop_ids(stop_tokens), reader.compressor
    stream, answer = reader.start(input_ids, attention_mask), list[Tensor]()

    def states() -> Iterator[Tensor]:
        yield stream.last
        for _ in range(max_new_tokens - 1):
            # Rows that have ended are fed any token.
            yield stream.read_on(answer[-1].clamp(0, its.vocabulary - 1))

    with hf.attach(its.model), its.without_checkpointing():
        return write(its, states(), answer, choose, stops, pad_token, streamer)
