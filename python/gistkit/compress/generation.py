"""Generation from a memory: batched, ragged, greedy or sampled, each row until its own stop token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gistkit import hf
from gistkit._checks import POSITIONS, whole
from gistkit.compress.memory import Memory, Task, check_memory
from gistkit.compress.model import SharedModel
from gistkit.compress.tokens import Rows, check_rows, pad
from gistkit.hf.cache import MemoryCache
from gistkit.layouts import Plan


class Streamer(Protocol):
    """The interface of transformers' streamers, which receive new tokens [B] as they come, and the end."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class MemoryReader(Protocol):
    """The part of a `Compressor` that generating and joining use."""

    lm: SharedModel
    reader: str | None

    def rows(self, name: str, ids: Any, attention_mask: Any = None, shortest: int = 0) -> Rows:
        """Token ids as users have them, checked and padded at the end of rows."""

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0 or 1, d]: the task token between memory and text."""

    def reading_plan(self, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
        """The plan of [memory][task token][text]..., of a memory that it has checked."""

    def last_of(self, memory: Memory) -> Tensor:
        """[B, d], the output that predicts what follows a memory without task token."""

    def check_readable(self, memory: Memory) -> None:
        """Refuses a memory of another method, shape or model, or on another device."""


@torch.no_grad()
def generate(
    compressor: MemoryReader,
    memory: Memory,
    prompt_ids: Any = None,
    attention_mask: Any = None,
    *,
    task: Task = "lm",
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
    """Tokens that follow [memory][task token, if any][prompt]; the memory is not changed and can be read again.

    Args:
        memory: what `encode` returned; one row serves any number of prompts.
        prompt_ids: int64 [B, T], or lists of ids of any lengths, or a tokenizer's output; None: no prompt.
        attention_mask: [B, T], 0 on padding at either end of a row.
        task: "ae" reconstructs the context, "lm" continues it, "qa" answers the prompt.
        max_new_tokens: tokens to generate at most, at least 1.
        do_sample: sample from the distribution; greedy otherwise.
        temperature: above 0, divides the logits before sampling.
        top_k, top_p: sample among the k likeliest tokens, or the likeliest ones that hold the share p.
        stop_tokens: a row ends after one of these ids; one id, or several.
        pad_token: fills a row behind its end, a token id or any other number.
        streamer: receives the new tokens [B] of each step, but no prompt: transformers' streamers with
            skip_prompt=False.
        generator: of the random numbers.

    Returns:
        int64 [B, n] with n <= max_new_tokens, fewer if every row has ended.
    """
    whole("max_new_tokens", max_new_tokens, high=POSITIONS)
    check_memory(memory)
    choose = chooser(do_sample, temperature, top_k, top_p, generator)
    prompt = (
        pad(((),) * memory.batch_size, compressor.lm.device)
        if prompt_ids is None
        else compressor.rows("prompt_ids", prompt_ids, attention_mask)
    )
    if memory.batch_size == 1 < prompt.batch_size:
        memory = memory.repeat(prompt.batch_size)
    check_rows("prompt_ids", prompt, memory.batch_size)
    if not torch.is_autocast_enabled(compressor.lm.device.type):
        memory = memory.to(dtype=compressor.lm.embed.weight.dtype)
    answer: list[Tensor] = []
    with compressor.lm.using(compressor.reader), compressor.lm.without_checkpointing():
        states = hidden_states(compressor, memory, task, prompt, max_new_tokens, answer)
        return write(compressor.lm, states, answer, choose, stop_ids(stop_tokens), pad_token, streamer)


def write(
    model: SharedModel,
    states: Iterable[Tensor],
    answer: list[Tensor],
    choose: Callable[[Tensor], Tensor],
    stops: Sequence[int],
    pad_token: int,
    streamer: Streamer | None,
) -> Tensor:
    """Tokens [B, n] chosen one after another, each row until its own stop token.

    Args:
        states: hidden states [B, d], each predicting the next token.
        answer: the tokens [B] chosen so far, which `states` may read; empty at the start.
        choose: tokens [B] of logits [B, V].
        stops, pad_token, streamer: as in `generate`.
    """
    stop = torch.tensor(stops, dtype=torch.int64, device=model.device)
    ended = torch.zeros((), dtype=torch.bool, device=model.device)
    for state in states:
        token = choose(model.logits(state)).masked_fill(ended, pad_token)
        answer.append(token)
        if streamer is not None:
            streamer.put(token.cpu())
        ended = ended | torch.isin(token, stop)
        if len(stops) and bool(ended.all()):
            break
    if streamer is not None:
        streamer.end()
    return torch.stack(answer, 1)


def stop_ids(stop_tokens: int | Iterable[int]) -> list[int]:
    try:
        return sorted(map(index, stop_tokens if isinstance(stop_tokens, Iterable) else [stop_tokens]))
    except TypeError as error:
        raise TypeError(f"stop_tokens: expected token ids, got {stop_tokens!r}") from error


def hidden_states(
    compressor: MemoryReader, memory: Memory, task: Task, prompt: Rows, count: int, answer: list[Tensor]
) -> Iterator[Tensor]:
    """Yields the hidden state [B, d] that predicts each next token, inside `compressor.lm.using(compressor.reader)`.

    Args:
        memory, task: as in `generate`, on the model's device and in its dtype.
        prompt: checked, of the memory's rows.
        count: number of states at most.
        answer: the tokens [B] chosen so far; its last one is read before the next state.
    """
    batch = memory.batch_size
    remainder = pad(memory.rest if task != "ae" else ((),) * batch, compressor.lm.device)
    # The last new token is not fed.
    new_tokens = Rows(torch.zeros(batch, count - 1, dtype=torch.int64), (count - 1,) * batch)
    plan = compressor.reading_plan(memory, task, (remainder, prompt, new_tokens), "max_new_tokens")
    lead = compressor.task_embedding(task, memory)
    inputs = torch.cat(
        [lead, *(compressor.lm.embedded(compressor.reader, part.ids) for part in (remainder, prompt))], 1
    )
    # A row's last token is the prompt's, or that of the remainder, or what precedes it: the task token, or the memory.
    last = [
        remainder.ids.shape[1] + length if length else previous
        for previous, length in zip(remainder.lengths, prompt.lengths, strict=True)
    ]
    cache = new_cache(compressor, memory, plan.num_queries)
    skip = 0
    if memory.embeddings is not None:
        skip = memory.num_tokens
        inputs = torch.cat([memory.embeddings.to(inputs.dtype), inputs], 1)
    rows, keys = inputs.shape[1], plan.num_keys - plan.num_queries
    first = plan.rows(0, rows, num_keys=keys + rows)
    out = inputs
    if rows:
        out = compressor.lm.run(compressor.reader, inputs_embeds=inputs, plan=first, cache=cache).last_hidden_state
    if not lead.shape[1]:
        out = torch.cat([compressor.last_of(memory)[:, None].to(out.dtype), out], 1)
    yield out[torch.arange(batch), torch.tensor(last) + skip]
    for row in range(rows, plan.num_queries):
        step = plan.rows(row, row + 1, num_keys=keys + row + 1)
        # Rows that have ended are fed any token.
        fed = answer[-1].clamp(0, compressor.lm.vocabulary - 1)[:, None]
        new = compressor.lm.embedded(compressor.reader, fed)
        out = compressor.lm.run(compressor.reader, inputs_embeds=new, plan=step, cache=cache)
        yield out.last_hidden_state[:, 0]


def new_cache(compressor: MemoryReader, memory: Memory, capacity: int) -> MemoryCache:
    """A cache with the memory's keys, or empty where the memory is embeddings, for `capacity` more rows."""
    start = max(memory.starts)
    if memory.layers is None:
        return hf.empty_cache(compressor.lm.config.num_hidden_layers, start, capacity=capacity)
    return hf.memory_cache(memory.layers, start, capacity=capacity)


def chooser(
    do_sample: bool, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Any:
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}; do_sample=False is greedy")
    if not do_sample:
        return lambda logits: logits.argmax(-1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))

    def sample(logits: Tensor) -> Tensor:
        probabilities = warpers(None, logits).softmax(-1)  # type: ignore[arg-type]
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    return sample
