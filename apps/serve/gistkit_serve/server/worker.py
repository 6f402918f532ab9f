"""Worker: the one thread that uses the model, which compresses texts and answers waiting questions together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from gistkit.ask.turns import Turns
from gistkit.common.checks import POSITIONS
from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import stop_ids
from gistkit.compress.memory import Memory
from gistkit.compress.tokens import text_ids
from gistkit_serve.server.errors import Refused, storage_failed
from gistkit_serve.server.shelf import Shelf
from gistkit_serve.server.writing import Writing

log = logging.getLogger("gistkit_serve")


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Args:
        text_tokens: tokens of a text to compress, at most.
        new_tokens: tokens of an answer, at most.
        batch: questions that are answered together, at most.
        batch_tokens: tokens of these with their memories and answers, including padding, at most; one question alone
            may have more.
        queue: requests that wait, at most.
    """

    text_tokens: int = 8192
    new_tokens: int = 1024
    batch: int = 16
    batch_tokens: int = 16384
    queue: int = 128


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; those of equal ones are chosen together.

    Args:
        temperature: 0 is greedy.
        top_p: as in `Compressor.generate`.
        seed: of the random numbers; a question with one is answered alone. None: they are not reproducible.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass
class Job:
    """A request for the worker.

    Args:
        tell: gets what came of it, or an error; called in the worker's thread.
        cancelled: set by whoever asked, or by the worker when all is told: nobody waits any more.
    """

    tell: Callable[[Any], None]
    cancelled: bool = field(default=False, init=False)


@dataclass
class Text(Job):
    """A text to compress. `tell` gets the `Entry` of its memory."""

    text: str


@dataclass
class Answer:
    """What came of a question.

    Args:
        text: of the answer.
        reason: "stop", or "length" where it was cut off.
        memory_tokens, prompt_tokens, new_tokens: of the memories with what is behind their windows, of the messages,
            and of the answer.
    """

    text: str
    reason: str
    memory_tokens: int
    prompt_tokens: int
    new_tokens: int


@dataclass
class Question(Job):
    """A conversation that ends with a question about memories. `tell` gets pieces of the text, then the `Answer`.

    Args:
        memories: ids, at least one; several are one context.
        turns: questions and the answers between them; the last one is a question.
        new_tokens: of the answer, at most.
        sampling: see there.
        stops: texts that end the answer.
        pieces: whether `tell` gets pieces; otherwise the `Answer` alone.
    """

    memories: Sequence[str]
    turns: Sequence[str]
    new_tokens: int
    sampling: Sampling
    stops: Sequence[str]
    pieces: bool = False


@dataclass(frozen=True)
class _Ready:
    """A question with its memory and token ids; `end` is the position behind the longest answer."""

    job: Question
    memory: Memory
    prompt: list[int]
    end: int

    @property
    def held(self) -> int:
        """Tokens of the memory, with those behind the window."""
        return self.memory.lengths[0] + len(self.memory.rest[0])


class Worker:
    """A thread that compresses texts and answers questions, in the order of their coming.

    Questions that wait and sample alike are answered together, up to `Limits.batch`; one that comes later waits for
    all of these. A cancelled request leaves with the next token.

    Args:
        compressor: with a tokenizer, in eval mode.
        shelf: of the memories.
        turns: the text around questions.
        limits: see there.
    """

    def __init__(self, compressor: Compressor, shelf: Shelf, turns: Turns, limits: Limits) -> None:
        self.compressor, self.shelf, self.turns, self.limits = compressor, shelf, turns, limits
        self.tokenizer = compressor.tokenizer
        self._positions: int = getattr(compressor.config, "max_position_embeddings", None) or POSITIONS
        self._ends = stop_ids(compressor.lm, {*stop_ids(compressor.lm, None), self.tokenizer.eos_token_id} - {None})
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.running: list[Job] = []
        self.done = 0
        self._thread = threading.Thread(target=self._run, name="gistkit-serve", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread answers."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queues a request.

        Raises:
            Refused: if too many wait, or the server ends.
        """
        with self._changed:
            if self._closing:
                raise Refused(503, "the server is shutting down", code="shutting_down")
            # Those that nobody waits for any more make room.
            if len(self._waiting) >= self.limits.queue:
                self._waiting = deque(other for other in self._waiting if not other.cancelled)
            if len(self._waiting) >= self.limits.queue:
                raise Refused(503, f"the queue is full, {self.limits.queue} requests are waiting", code="queue_full")
            self._waiting.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Refuses what waits, what comes and what runs, which ends at its next token."""
        with self._changed:
            self._closing = True
            jobs = [*self.running, *self._waiting]
            self._waiting.clear()
            self._changed.notify()
        _refuse(jobs, Refused(503, "the server is shutting down", code="shutting_down"))

    def close(self) -> None:
        """`stop`, and waits until the thread has ended."""
        self.stop()
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if isinstance(job, Text):
                    self._compress(job)
                elif isinstance(job, Question):
                    self._answer(self._batch(job))
            except (Refused, ValueError) as error:
                _refuse(self.running, error)
            except OSError as error:
                log.warning("a request failed: %s", error)
                _refuse(self.running, storage_failed(error))
            # Whatever a request does, the next one is served. A panic of the tokenizer is no Exception.
            except BaseException as error:
                log.exception("a request failed")
                _refuse(self.running, _failed(error))
            finally:
                with self._changed:
                    self.done += len(self.running)
                    self.running = []

    def _next(self) -> Job | None:
        """The next request that somebody waits for; None at the end."""
        with self._changed:
            while not self._closing:
                while self._waiting:
                    job = self._waiting.popleft()
                    if not job.cancelled:
                        self.running = [job]
                        return job
                self._changed.wait()
        return None

    def _batch(self, first: Question) -> list[_Ready]:
        """A question with those that wait and can be answered with it."""
        batch = [self._ready(first)]
        with self._changed:
            alike = [job for job in self._waiting if isinstance(job, Question) and job.sampling == first.sampling]
        for job in alike if first.sampling.seed is None else []:
            if len(batch) == self.limits.batch or self._closing:
                break
            try:
                ready = None if job.cancelled else self._ready(job)
            except Exception as error:
                _refuse([job], error if isinstance(error, Refused | ValueError) else _failed(error))
                with self._changed, suppress(ValueError):
                    self._waiting.remove(job)
                continue
            if ready is None:
                continue
            if not self._fit([*batch, ready]):
                break
            with self._changed:
                if job not in self._waiting:
                    break
                self._waiting.remove(job)
                self.running.append(job)
            batch.append(ready)
        return batch

    def _fit(self, batch: Sequence[_Ready]) -> bool:
        """Whether questions together keep to the limits of tokens and of the model's positions."""
        new = max(ready.job.new_tokens for ready in batch)
        width = max(ready.held for ready in batch) + max(len(ready.prompt) for ready in batch) + new
        end = max(ready.end - ready.job.new_tokens for ready in batch) + new
        return len(batch) * width <= self.limits.batch_tokens and end <= self._positions

    def _ready(self, job: Question) -> _Ready:
        """Finds the memory of a question and its token ids."""
        compressor = self.compressor
        memories = []
        for name in job.memories:
            try:
                memories.append(self.shelf.get(name))
            except KeyError:
                raise Refused(
                    404, f"memory: expected the id of a memory, got {name[:80]!r}", "memory", code="memory_not_found"
                ) from None
        try:
            memory = compressor.join(memories) if len(memories) > 1 else memories[0]
        except ValueError as error:
            raise Refused(400, f"memory: {str(error).removeprefix('memories: ')}", "memory") from error
        memory = memory.to(dtype=compressor.embed.weight.dtype)
        prompt = self._tokens(job.turns)
        lead = compressor.task_embedding("qa", memory).shape[1]
        end = memory.starts[0] + lead + len(memory.rest[0]) + len(prompt) + job.new_tokens
        if end > self._positions:
            raise Refused(
                400,
                f"messages: expected memory, messages and answer within the model's {self._positions} positions, "
                f"got {end}",
                "messages",
                code="context_length_exceeded",
            )
        return _Ready(job, memory, prompt, end)

    def _tokens(self, turns: Sequence[str]) -> list[int]:
        """The token ids of a conversation, as `Conversation` reads one whose answers ended by themselves."""
        end = self.tokenizer.eos_token_id
        ids = self.turns.ids(self.tokenizer, turns[0], None)
        for answer, question in zip(turns[1::2], turns[2::2], strict=True):
            ids += text_ids(answer, self.tokenizer, special_tokens=False)
            ids += [end] if end is not None else []
            ids += self.turns.ids(self.tokenizer, question, ids[-1])
        return ids

    def _compress(self, job: Text) -> None:
        row = text_ids(job.text, self.tokenizer)
        if not 1 <= len(row) <= self.limits.text_tokens:
            raise Refused(
                413 if row else 400, f"text: expected 1 to {self.limits.text_tokens} tokens, got {len(row)}", "text"
            )
        memory = self.compressor.encode([row])
        if not job.cancelled:
            job.tell(self.shelf.add(memory))
            job.cancelled = True

    def _answer(self, batch: Sequence[_Ready]) -> None:
        """Answers questions together, each to its own end."""
        first = batch[0].job
        same = all(ready.job.memories == first.memories for ready in batch)
        memory = batch[0].memory.repeat(len(batch)) if same else Memory.stack([ready.memory for ready in batch])
        rows = _Rows(batch, self._decode, self._ends)
        sampling = first.sampling
        generator = None
        if sampling.seed is not None:
            generator = torch.Generator(self.compressor.device).manual_seed(sampling.seed)
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        self.compressor.generate(
            memory,
            [ready.prompt for ready in batch],
            task="qa",
            max_new_tokens=max(ready.job.new_tokens for ready in batch),
            stop_tokens=self._ends,
            stopping_criteria=StoppingCriteriaList([rows]),
            generator=generator,
            **options,
        )

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _failed(error: BaseException) -> Refused:
    return Refused(500, f"the server failed: {type(error).__name__}", code="failed")


def _refuse(jobs: Sequence[Job], error: Exception) -> None:
    """Tells those who still wait why they get nothing."""
    for job in jobs:
        if not job.cancelled:
            job.cancelled = True
            job.tell(error)


class _Rows(StoppingCriteria):
    """Reads each new token of a batch, tells the questions what is new, and says which of them have ended."""

    def __init__(self, batch: Sequence[_Ready], decode: Callable[[list[int]], str], ends: Sequence[int]) -> None:
        self._batch, self._ends = batch, {*ends}
        self._writings = [Writing(decode, ready.job.stops) for ready in batch]
        self._over = [False] * len(batch)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._over[row]:
                self._over[row] = self._read(self._batch[row], self._writings[row], token)
        return torch.tensor(self._over, device=input_ids.device)

    def _read(self, ready: _Ready, writing: Writing, token: int) -> bool:
        """Whether the answer ends with a token."""
        job = ready.job
        if job.cancelled:
            return True
        writing.add(token)
        ended = token in self._ends
        over = ended or len(writing.tokens) >= job.new_tokens
        if over or job.pieces or job.stops:
            piece = writing.look(over)
            if piece and job.pieces:
                job.tell(piece)
        if not over and not writing.stopped:
            return False
        reason = "stop" if ended or writing.stopped else "length"
        job.tell(Answer(writing.text, reason, ready.held, len(ready.prompt), len(writing.tokens)))
        # Nothing is left to tell.
        job.cancelled = True
        return True
