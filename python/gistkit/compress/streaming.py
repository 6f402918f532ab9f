"""Stream: texts read token by token, of which a cache keeps what can still be seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gistkit import hf
from gistkit.compress.generation import Streamer, chooser, stop_ids, write
from gistkit.compress.in_place import GISTS, TEXT
from gistkit.compress.selection import rule_scores
from gistkit.compress.tokens import Rows
from gistkit.layouts import Plan
from gistkit.nn import nuggets_above

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use
    from gistkit.compress.mixed import MixedResolution


class Held:
    """The keys of a batch's tokens that can still be seen; those that cannot are dropped once a segment.

    The first columns of the cache hold what was left of each row when it was last cleared, at the row's first columns;
    the columns behind them hold the tokens since, of all rows alike.

    Args:
        layers: (key, value) of each layer, [B, Hk, K, D].
        positions: of the keys of each row, ascending, K at most.
        nuggets: those positions of each row that stay for good; BOS does too.
        first: the first position that is seen uncompressed, by the position of the token that sees.
        ends: position of the next token of each row, for which the keys are what it sees.
        room: tokens until the next clearing, about.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        positions: Sequence[Sequence[int]],
        nuggets: Sequence[Iterable[int]],
        first: Callable[[int], int],
        ends: Sequence[int],
        room: int,
    ) -> None:
        self.first, self.room = first, room
        self.old = [list(row) for row in positions]
        self.new: list[list[int]] = [[] for _ in positions]
        self.for_good = [{0, *row} for row in nuggets]
        self.firsts = [first(end) for end in ends]
        self._put(layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """Keys held of each row."""
        return tuple(len(old) + len(new) for old, new in zip(self.old, self.new, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, those between rows of unequal length too."""
        return sum(tensor.nbytes for layer in self.cache.held for tensor in layer)

    def clear(self, positions: Sequence[int]) -> None:
        """Drops what tokens at these positions, and those after them, do not see."""
        firsts = [self.first(position) for position in positions]
        if firsts == self.firsts:
            return
        columns: list[list[int]] = []
        for row, first in enumerate(firsts):
            there = [*enumerate(self.old[row]), *enumerate(self.new[row], self.width)]
            left = [(at, it) for at, it in there if it >= first or it in self.for_good[row]]
            columns.append([at for at, _ in left])
            self.old[row], self.new[row] = [it for _, it in left], []
        self.firsts = firsts
        width = max(map(len, columns))
        held = self.cache.held
        index = torch.tensor([row + [0] * (width - len(row)) for row in columns], device=held[0][0].device)
        index = index[:, None, :, None]
        self._put([(key.take_along_dim(index, 2), value.take_along_dim(index, 2)) for key, value in held])

    def plan(self, positions: Sequence[int], windows: Iterable[int]) -> Plan:
        """The plan of one new token a row, at these positions, which sees what is held, and itself."""
        device = self.cache.held[0][0].device
        keys = self.width + len(self.new[0]) + 1

        def spans(window: int | None) -> Tensor:
            rows = []
            for old, new, position in zip(self.old, self.new, positions, strict=True):
                # A sliding window cuts what is older in the text.
                least = 0 if window is None else position - window + 1
                a, b = bisect_left(old, least), self.width + bisect_left(new, least)
                rows.append([[[a, len(old)], [b, keys]] if a < len(old) else [[b, keys], [0, 0]]])
            return torch.tensor(rows, dtype=torch.int32, device=device)

        at = torch.tensor(positions, device=device)[:, None]
        plan = Plan(spans(None), keys, at, reach=max(positions) + 1)
        return plan.with_windows({window: spans(window) for window in windows})

    def add(self, positions: Sequence[int], chosen: Sequence[bool]) -> None:
        """The tokens of the plan were read, and those of `chosen` are nuggets."""
        for row, (position, nugget) in enumerate(zip(positions, chosen, strict=True)):
            self.new[row].append(position)
            if nugget:
                self.for_good[row].add(position)

    def _put(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.cache = hf.memory_cache(layers, 0, capacity=self.room)
        self.width = self.cache.get_query_offset()


class Stream:
    """Texts that a `MixedResolution` reads on token by token, with a cache of about n / ratio + tau of n tokens.

    What a token sees, and its position, are those of one pass over the whole text. A loop of steps is faster inside
    `hf.attach(model)`, which each step opens otherwise.

    Args:
        reader: whose parameters, threshold and sizes serve.
        read: texts behind BOS, which are read in one pass.
    """

    @torch.no_grad()
    def __init__(self, reader: MixedResolution, read: Rows) -> None:
        self.reader = reader
        its = reader.compressor
        self.ends = list(read.lengths)
        seen = [range(reader.first(end), end) for end in self.ends]
        self._scored: Held | None = None
        keep, recent = None, [[0, *(it for it in row if it)] for row in seen]
        if its.scorer is not None:
            keep = hf.KeptKeys(self._columns(recent))
        scores = reader.scores(read, keep=keep)
        if keep is not None:
            self._scored = self._held(keep, recent, [()] * len(recent))
        chosen = reader.nuggets(read, scores)
        nuggets = [row.nonzero()[0].tolist() for row in chosen.cpu().numpy()]
        left = [sorted({*row, *its}) for row, its in zip(recent, nuggets, strict=True)]
        plan = reader.plan(chosen)
        where = self._columns(left)
        keep = hf.KeptKeys(where if plan.inverse is None else plan.inverse.gather(1, where))
        hidden = reader.hidden(read, chosen, plan=plan, keep=keep)
        self._main = self._held(keep, left, nuggets)
        last = torch.tensor(self.ends, device=its.device)[:, None, None] - 1
        self.last: Tensor = hidden.take_along_dim(last, 1)[:, 0]

    @property
    def states(self) -> tuple[int, ...]:
        """Tokens of each row whose keys and values are held in every layer."""
        return self._main.counts

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held, those that scores are made with too."""
        return self._main.nbytes + (0 if self._scored is None else self._scored.nbytes)

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
        chosen = nuggets_above(self._scores(tokens, inputs)[:, None], its.threshold, keep_last=False)[:, 0].tolist()
        self._main.clear(self.ends)
        plan = self._main.plan(self.ends, its.windows)
        out = its.run(self._served(chosen), inputs_embeds=inputs, plan=plan, past_key_values=self._main.cache)
        self._main.add(self.ends, chosen)
        self.ends = [end + 1 for end in self.ends]
        self.last = out.last_hidden_state[:, 0]
        return self.last

    def _scores(self, tokens: Tensor, inputs: Tensor) -> Tensor:
        """Scores [B] of the next tokens."""
        its = self.reader.compressor
        if its.scorer is None or self._scored is None:
            places = torch.tensor(self.ends, device=its.device) - 1
            return rule_scores(its.selection, tokens, places, its.chunk, its.delimiters)
        self._scored.clear(self.ends)
        plan = self._scored.plan(self.ends, its.windows)
        with hf.first_layers(its.model, its.layer):
            out = its.run(None, inputs_embeds=inputs, plan=plan, past_key_values=self._scored.cache)
        self._scored.add(self.ends, [False] * len(self.ends))
        scores: Tensor = its.scorer(out.last_hidden_state)
        return scores[:, 0]

    def _served(self, chosen: Sequence[bool]) -> Use:
        if not self.reader.compressor.separate:
            return TEXT
        roles = tuple(GISTS if nugget else TEXT for nugget in chosen)
        return roles if len(set(roles)) > 1 or self.reader.compressor.adapters is None else roles[0]

    def _columns(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.reader.compressor.device)

    def _held(self, keep: hf.KeptKeys, left: Sequence[Sequence[int]], nuggets: Sequence[Iterable[int]]) -> Held:
        return Held(keep.close(), left, nuggets, self.reader.first, self.ends, self.reader.segment)


@torch.no_grad()
def generate(
    reader: MixedResolution,
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
