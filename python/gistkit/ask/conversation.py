"""Conversation: several questions about one memory, each read after the earlier questions and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from gistkit.common.checks import POSITIONS, check_int
from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import Behind, Loop, Passes, answering, configured, new_cache
from gistkit.compress.memory import Memory, check_memory
from gistkit.compress.tokens import Rows, check_rows
from gistkit.hf.cache import LEAST_ROOM, MemoryLayer
from gistkit.inspect import AttentionMap, AttentionRecorder
from gistkit.inspect.recorder import LARGEST_MAP
from gistkit.layouts import Plan

# Rows of an answer whose attention is in memory at a time, in all layers.
ROWS = 32


class Conversation:
    """Questions and answers about one memory, with one KV cache for all turns, so that only new tokens are read.

    The model reads [memory][task token, if any][rest after the window][prompt][answer][prompt][answer]..., as
    `generate` with the task "qa" reads one prompt; the first answer is the same. When the next turn would exceed the
    model's `max_position_embeddings`, the oldest turns are dropped and the others are read again.

        conversation = Conversation(compressor, Memory.load("report.gist"))
        answer = conversation.reply(tokenizer("Who wrote it?"), stop_tokens=[tokenizer.eos_token_id])
        answer = conversation.reply(tokenizer("And when?"), stop_tokens=[tokenizer.eos_token_id])

    Args:
        compressor: the compressor that made the memories.
        memories: at least one, each of one row; several are one context, as in `Compressor.join`.

    Raises:
        TypeError, ValueError: if there is none, or one has several rows or cannot be read by `compressor`.
    """

    def __init__(self, compressor: Compressor, *memories: Memory) -> None:
        if not memories:
            raise ValueError("memories: expected at least one, got none")
        for memory in memories:
            check_memory(memory)
            if memory.batch_size != 1:
                raise ValueError(f"memories: expected the memory of one text in each, got {memory.batch_size} rows")
        memory = compressor.join(memories) if len(memories) > 1 else memories[0]
        compressor.check_readable(memory)
        self.compressor, self.memories = compressor, memories
        self.memory = memory.to(dtype=compressor.embed.weight.dtype)
        self._lead = compressor.task_embedding("qa", memory).shape[1]
        self._text = list(memory.rest[0])
        # Tokens of each turn; those of the last answer, and whether its last one is a stop token.
        self._turns: list[int] = []
        self._answer, self._ended = 0, False
        # Their cache has that many tokens of the text.
        self._passes: Passes | None = None
        self._read = 0

    @property
    def text(self) -> list[int]:
        """Token ids after the memory: those after the window, then prompts and answers."""
        return list(self._text)

    @property
    def rest(self) -> slice:
        """The keys, in `attention`, of the document's tokens after the compressor's window."""
        start = self.memory.num_tokens + self._lead
        return slice(start, start + len(self.memory.rest[0]))

    @property
    def turns(self) -> int:
        """Number of turns (a question and its answer each) before the next question."""
        return len(self._turns)

    def new(self) -> None:
        """Starts a new conversation; the memory stays in the cache."""
        self._forget(len(self._turns))

    def make_room(self, tokens: int) -> int:
        """Drops the oldest turns until `tokens` more fit into the model's positions; returns how many it dropped.

        None are dropped if the model has no such limit. `reply` calls it; call it yourself only to report the dropped
        turns.
        """
        check_int("tokens", tokens, high=POSITIONS)
        limit = getattr(self.compressor.config, "max_position_embeddings", None)
        if limit is None:
            return 0
        excess = self.memory.starts[0] + self._lead + len(self._text) + tokens - limit
        freed = [0, *accumulate(self._turns)]
        count = next((turns for turns, size in enumerate(freed) if size >= excess), len(self._turns))
        if count:
            self._forget(count)
        return count

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """An error or Ctrl-C inside leaves the conversation as it was before the block."""
        text, turns = list(self._text), list(self._turns)
        try:
            yield
        except BaseException:
            # A pass that was broken off may have left layers of different lengths.
            self._passes, self._read = None, 0
            self._text, self._turns = text, turns
            raise

    @torch.no_grad()
    def reply(
        self,
        prompt_ids: Any,
        *,
        generation_config: GenerationConfig | None = None,
        stop_tokens: int | Iterable[int] | None = None,
        streamer: BaseStreamer | None = None,
        generator: torch.Generator | None = None,
        stopped: Callable[[], Any] = lambda: False,
        **options: Any,
    ) -> Tensor:
        """Answers a prompt: int64 [n] with 1 <= n <= max_new_tokens; both become part of the conversation.

        An error or Ctrl-C inside leaves the conversation as it was before the prompt.

        Args:
            prompt_ids: int64 [T] or [1, T], a list of ids or a tokenizer's output, T >= 1.
            stopped: called after each token; the answer ends when it returns something true.
            others: as in `gistkit.compress.generation.generate`, without beams and drafts.
        """
        lm = self.compressor.lm
        prompt = self.compressor.rows("prompt_ids", prompt_ids, shortest=1)
        check_rows("prompt_ids", prompt, 1)
        (width,) = prompt.lengths
        config, options = configured(lm, width, generation_config, stop_tokens, None, options)
        config.return_dict_in_generate = False

        def ends(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((1,), bool(stopped()), device=input_ids.device)

        options["stopping_criteria"] = [*(options.pop("stopping_criteria", None) or ()), ends]
        with self.unchanged_on_error():
            self.make_room(width + config.max_new_tokens)
            before = len(self._text)
            with answering(self.compressor, config.max_new_tokens) as behind:
                turn = _Turn(self, self._plan(before + width + config.max_new_tokens - 1), behind)
                tokens: Tensor = turn.write(prompt.ids, config, streamer, generator, options)[0]
                cast(Passes, self._passes).settle()
        self._text[before + width :] = tokens.tolist()
        stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self._answer, self._ended = len(tokens), int(tokens[-1]) in stops
        self._turns.append(len(self._text) - before)
        return tokens

    @torch.no_grad()
    def attention(self, *, by_head: bool = False) -> Tensor:
        """Attention of the last answer to each key, float64 [keys]: summed over its tokens, mean of heads and layers.

        `by_head` gives the parts of this mean, [keys, A], from each of A layers and key heads, layer by layer.

        An error or Ctrl-C inside leaves the conversation as it was.

        A token's attention is that of the row that predicts it; a stop token at the end does not count. Keys are the
        memory, the task token and the text. The answer is read a second time, in passes of a few rows under an
        `AttentionRecorder`; `reply` itself is not slowed down.

        Raises:
            ValueError: if there is no answer yet.
        """
        if not self._turns:
            raise ValueError("attention: expected a conversation with an answer, got none yet")
        # The row before a token predicts it.
        start = len(self._text) - self._answer - 1
        end = len(self._text) - 1 - self._ended
        self._cut(start)
        plan, lm = self._plan(len(self._text)), self.compressor.lm
        counts = None if self.memory.counts is None else [own.flatten().tolist() for own in self.memory.counts]
        heads = [count if by_head or counts else 1 for count, _ in lm.head_shapes]
        total = torch.zeros(sum(heads), plan.num_keys, dtype=torch.float64)
        # Of what is packed.
        memory = torch.zeros(0 if counts is None else len(self.memory.positions), dtype=torch.float64)
        with self.unchanged_on_error(), lm.using(self.compressor.reader), lm.without_checkpointing():
            if self._read < start:
                self._feed(plan, start)
            most = ROWS if counts is None else min(ROWS, self._rows_of_maps(plan))
            while self._read < end:
                rows = min(most, end - self._read)
                with _Sums(rows, "none" if by_head or counts else "mean", total.split(heads), memory, counts):
                    self._feed(plan, self._read + rows)
        total = total.mT if counts is None else torch.cat([self.memory.in_columns(memory)[0], total.mT])
        return total if by_head else total.sum(1)

    def _rows_of_maps(self, plan: Plan) -> int:
        """How many rows of a plan have maps of packed keys that are not too large."""
        # A head's map has a column for each key of its layer and for the room of texts, of which half may be empty.
        read = 0 if self._passes is None else self._passes.cache.get_query_offset()
        room = max(LEAST_ROOM, 2 * max(plan.num_keys, read))
        columns = max(int(own.sum()) + own.shape[1] * room for own in self.memory.counts or ())
        return max(1, LARGEST_MAP // (self.compressor.lm.config.num_attention_heads * max(1, columns)))

    def _plan(self, tokens: int) -> Plan:
        """The plan of the memory and that many tokens of text."""
        text = Rows(torch.zeros(1, tokens, dtype=torch.int64), (tokens,))
        return self.compressor.reading_plan(self.memory, "qa", (text,), "max_new_tokens")

    def _feed(self, plan: Plan, end: int, behind: Behind | None = None) -> Tensor:
        """Reads the text up to `end`; the hidden state [1, d] of its last token."""
        compressor, memory = self.compressor, self.memory
        ids = torch.tensor([self._text[self._read : end]], device=compressor.device)
        lead = None
        first = self._lead + (0 if memory.embeddings is None else memory.num_tokens) + self._read
        if self._passes is None:
            self._passes, first = Passes(compressor, new_cache(compressor, memory, plan.num_queries)), 0
            lead = compressor.task_embedding("qa", memory)
            if memory.embeddings is not None:
                lead = torch.cat([memory.embeddings.to(lead.dtype), lead], 1)
        self._passes.behind = behind
        hidden_states = self._passes.read(ids, plan, first, lead)
        self._read = end
        return hidden_states[:, -1]

    def _forget(self, turns: int) -> None:
        """Lets the oldest turns go; what was read after them is read again."""
        start = len(self._text) - sum(self._turns)
        self._cut(start)
        del self._text[start : start + sum(self._turns[:turns])]
        del self._turns[:turns]

    def _cut(self, tokens: int) -> None:
        """Drops from the cache what it has read of the text beyond the first `tokens`."""
        if self._passes is not None and tokens < self._read:
            for layer in cast("list[MemoryLayer]", self._passes.cache.layers):
                layer.crop(tokens - self._read)
            self._read = tokens


class _Sums(AttentionRecorder):
    """Adds up the attention of a pass's last rows as layers come, as maps of all of them would fill the memory.

    Args:
        text: float64 [A, keys] of each layer, to which its attention is added.
        memory: float64, the same of what is packed.
        counts: of each layer's heads, how many of these keys each has; None: nothing is packed.
    """

    def __init__(
        self, rows: int, reduce: str, text: Sequence[Tensor], memory: Tensor, counts: Sequence[Sequence[int]] | None
    ) -> None:
        super().__init__(rows=slice(-rows, None), reduce=reduce)
        self._into, self._counts = text, counts
        self._memory = memory.split([size for own in counts or () for size in own] or len(memory))

    def take(self, found: AttentionMap) -> None:
        """See `AttentionRecorder.take`."""
        if self._counts is None:
            self._add(found.layer, found.weights[0].double())
            return
        # Each key head is a sequence, whose keys are those of the memory's heads, and then those of the text's.
        counts, weights = self._counts[found.layer], found.weights.double()
        heads, first, start = len(counts), sum(map(len, self._counts[: found.layer])), 0
        for into, own in zip(self._memory[first : first + heads], weights, strict=True):
            into += own[..., start : start + len(into)].sum(1).mean(0) / heads / len(self._into)
            start += len(into)
        # There may be room after the text.
        text = weights[..., start:].unflatten(-1, (heads, -1))[..., : self._into[found.layer].shape[1]]
        self._add(found.layer, torch.cat([own[:, :, head] for head, own in enumerate(text)]))

    def _add(self, layer: int, weights: Tensor) -> None:
        """Adds those [heads, rows, keys] of a layer to the text."""
        into = self._into[layer]
        added = weights.sum(1).unflatten(0, (len(into), -1)).mean(1)
        into[:, : added.shape[1]] += added / len(into) / len(self._into)


class _Turn(Loop):
    """The conversation so far, a prompt and the answer to it."""

    def __init__(self, conversation: Conversation, plan: Plan, behind: Behind | None) -> None:
        super().__init__(conversation.compressor.lm)
        self._conversation, self._turn_plan, self._behind = conversation, plan, behind
        self._before = len(conversation._text)

    def states(self, input_ids: Tensor) -> Tensor:
        text = self._conversation._text
        text[self._before :] = input_ids[0].tolist()
        return self._conversation._feed(self._turn_plan, len(text), self._behind)[:, None]
