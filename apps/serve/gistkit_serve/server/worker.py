"""Worker: one thread answers questions together, which come and go between two tokens; another compresses texts."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from gistkit.ask.turns import Turns
from gistkit.common.checks import POSITIONS, check_int
from gistkit.common.text_ids import text_ids
from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import answering, stop_ids
from gistkit.compress.memory import Memory
from gistkit_serve.server.errors import Refused, storage_failed
from gistkit_serve.server.repository import MemoryRepository
from gistkit_serve.server.rows import Row, Rows
from gistkit_serve.server.writing import Writing

log = logging.getLogger("gistkit_serve")
# By how much the thread that compresses gives way to the one that answers.
_NICE = 5
# Seconds that a text which is being compressed has at the end.
_GRACE = 5.0


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Args:
        text_tokens: tokens of a text to compress, at most.
        new_tokens: tokens of an answer, at most.
        batch: questions that are answered together, at most.
        batch_tokens: tokens of these with their memories and answers, including padding, at most; one question alone
            may have more.
        queue: questions that wait, and texts that wait, at most.
    """

    text_tokens: int = 8192
    new_tokens: int = 1024
    batch: int = 16
    batch_tokens: int = 16384
    queue: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_int(name, value)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: 0 is greedy.
        top_p: as in `Compressor.generate`.
        seed: of the random numbers. None: they are not reproducible.
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
        memories: ids; several are one context, and without one the question is read by itself.
        turns: questions and the answers between them; the last one is a question.
        new_tokens: of the answer, at most.
        stops: texts that end the answer.
        pieces: whether `tell` gets pieces; otherwise the `Answer` alone.
        endless: an end token ends no answer.
    """

    memories: Sequence[str]
    turns: Sequence[str]
    new_tokens: int
    sampling: Sampling
    stops: Sequence[str]
    pieces: bool = False
    endless: bool = False


class _Answer:
    """A question that is being answered, the memory of all its memories, its token ids, and what is written so far."""

    def __init__(
        self, job: Question, memory: Memory | None, prompt: list[int], decode: Callable[[list[int]], str]
    ) -> None:
        self.job, self.memory, self.prompt = job, memory, prompt
        self.writing = Writing(decode, job.stops)
        sampling, self._processors = job.sampling, list[LogitsProcessor]()
        if sampling.temperature > 0:
            # As transformers' loop has them.
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        self._generator: torch.Generator | None = None

    @property
    def held(self) -> int:
        """Tokens of the memory, with those behind the window."""
        return 0 if self.memory is None else self.memory.sizes[0] + len(self.memory.rest[0])

    @property
    def packed(self) -> int:
        """Tokens of a memory that no padding makes wider."""
        return 0 if self.memory is None or self.memory.counts is None else self.memory.sizes[0]

    @property
    def width(self) -> int:
        """Tokens of all other parts, which rows beside it are padded to."""
        return self.held - self.packed + len(self.prompt) + self.job.new_tokens

    def choose(self, logits: Tensor) -> int:
        """The next token, of logits [V]."""
        if not self._processors:
            return int(logits.argmax())
        if self._generator is None:
            self._generator = torch.Generator(logits.device)
            seed = self.job.sampling.seed
            _ = self._generator.seed() if seed is None else self._generator.manual_seed(seed)
        scores = logits[None]
        for processor in self._processors:
            scores = processor(None, scores)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def over(self, token: int, ends: set[int]) -> bool:
        """Whether the answer ends with a token; the question is told what is new."""
        job, writing = self.job, self.writing
        writing.add(token)
        ended = token in ends and not job.endless
        over = ended or len(writing.tokens) >= job.new_tokens
        if over or job.pieces or job.stops:
            piece = writing.look(over)
            if piece and job.pieces:
                job.tell(piece)
        if not over and not writing.stopped:
            return False
        reason = "stop" if ended or writing.stopped else "length"
        job.tell(Answer(writing.text, reason, self.held, len(self.prompt), len(writing.tokens)))
        # Nothing is left to tell.
        job.cancelled = True
        return True


class Worker:
    """A thread that answers questions and one that compresses texts, each in the order of their coming.

    A question joins those that are being answered at the next token, up to `Limits.batch` of them, and leaves when it
    is done, or at the next token once it is cancelled. Texts are compressed by a second compressor, which has the
    weights of the first one, so that no question waits for them.

    Args:
        compressor: with a tokenizer, in eval mode.
        turns: the text around questions.
    """

    def __init__(self, compressor: Compressor, repository: MemoryRepository, turns: Turns, limits: Limits) -> None:
        self.compressor, self.repository, self.turns, self.limits = compressor, repository, turns, limits
        self.tokenizer = compressor.tokenizer
        # Copied before the first answer changes what its modules call.
        self._twin = _twin(compressor)
        self._positions: int = getattr(compressor.config, "max_position_embeddings", None) or POSITIONS
        self._ends = {*stop_ids(compressor.lm, None), self.tokenizer.eos_token_id} - {None}
        # RoPE that changes with the length of a pass would change with other rows.
        self._batch = 1 if compressor.lm.changing_rope else limits.batch
        self._questions: deque[Question] = deque()
        self._texts: deque[Text] = deque()
        self._changed = threading.Condition()
        # Taken from the queue, and waits for room.
        self._next: _Answer | None = None
        # What questions read now, by ids: those about the same memories read the same tensors.
        self._known = WeakValueDictionary[tuple[str, ...], Memory]()
        self._closing = False
        self.running: list[Job] = []
        self.done = 0
        self.tokens = 0
        """Tokens that were written, in all answers."""
        work = self._answer, self._compress
        self._threads = [threading.Thread(target=each, name=f"gistkit{each.__name__}", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether both threads go on."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._questions) + len(self._texts)

    def submit(self, job: Text | Question) -> None:
        """Queues a request.

        Raises:
            Refused: if too many wait, or the server ends.
        """
        with self._changed:
            if self._closing:
                raise Refused(503, "the server is shutting down", code="shutting_down")
            queue: deque[Any] = self._texts if isinstance(job, Text) else self._questions
            # Those that nobody waits for any more make room.
            if len(queue) >= self.limits.queue:
                kept = [other for other in queue if not other.cancelled]
                queue.clear()
                queue.extend(kept)
            if len(queue) >= self.limits.queue:
                raise Refused(503, f"the queue is full, {self.limits.queue} requests are waiting", code="queue_full")
            queue.append(job)
            self._changed.notify_all()

    def stop(self) -> None:
        """Refuses what waits, what comes and what runs, which ends at its next token."""
        with self._changed:
            self._closing = True
            jobs = [*self.running, *self._questions, *self._texts]
            self._questions.clear()
            self._texts.clear()
            self._changed.notify_all()
        _refuse(jobs, Refused(503, "the server is shutting down", code="shutting_down"))

    def close(self) -> None:
        """`stop`, and waits until the threads have ended; some seconds for a text that is being compressed."""
        self.stop()
        answering, compressing = self._threads
        answering.join()
        # A long text is read to its end, and the thread ends with the process.
        compressing.join(_GRACE)

    def _wait(self, queue: deque[Any]) -> bool:
        """Waits for a request; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or queue)
            return not self._closing

    def _take(self, queue: deque[Any]) -> Any:
        """The next request that somebody waits for, which runs now; None: there is none."""
        with self._changed:
            while queue:
                job = queue.popleft()
                if not job.cancelled:
                    self.running.append(job)
                    return job
        return None

    def _finish(self, job: Job, error: BaseException | None = None) -> None:
        """Whatever a request does, the next one is served."""
        if error is not None:
            _refuse([job], _refusal(error))
        with self._changed:
            self.running.remove(job)
            self.done += 1

    @torch.no_grad()
    def _compress(self) -> None:
        # Linux takes a thread's number, and those that compute for it are as nice: questions come first.
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICE)
        while self._wait(self._texts):
            if (job := self._take(self._texts)) is None:
                continue
            try:
                job.tell(self._memory(self._twin, job))
                self._finish(job)
            # A panic of the tokenizer is no Exception.
            except BaseException as error:
                self._finish(job, error)

    def _memory(self, compressor: Compressor, job: Text) -> Any:
        row = text_ids(job.text, compressor.tokenizer)
        if not 1 <= len(row) <= self.limits.text_tokens:
            raise Refused(
                413 if row else 400, f"text: expected 1 to {self.limits.text_tokens} tokens, got {len(row)}", "text"
            )
        memory = compressor.encode([row])
        return None if job.cancelled else self.repository.add(memory)

    @torch.no_grad()
    def _answer(self) -> None:
        while self._wait(self._questions):
            try:
                # The weights are prepared for answers until nobody asks.
                with answering(self.compressor, self.limits.new_tokens):
                    self._answer_all()
            except BaseException as error:
                self._next = None
                jobs = [job for job in self.running if isinstance(job, Question)]
                for job in jobs or [self._take(self._questions)]:
                    if job is not None:
                        self._finish(job, error)

    def _answer_all(self) -> None:
        """Answers questions until none waits: between two tokens others join, and parts of prompts are read."""
        rows, answers = Rows(self.compressor, self.limits.batch_tokens), dict[Row, _Answer]()
        while True:
            self._join(rows, answers)
            for row in [row for row, answer in answers.items() if answer.job.cancelled]:
                self._leave(rows, answers, row)
            if answers:
                self._read(rows, answers, rows.writing, rows.reading)
            if not answers and self._next is None and not self._questions:
                return

    def _join(self, rows: Rows, answers: dict[Row, _Answer]) -> None:
        """The next questions join as long as there is room."""
        while len(rows) < self._batch:
            self._next = answer = self._next or self._ready()
            if answer is None:
                return
            if answer.job.cancelled:
                self._next = None
                self._finish(answer.job)
                continue
            width = max(rows.longest, answer.width)
            # One that rows share is held once.
            packed = rows.packed + (0 if rows.holds(answer.memory) else answer.packed)
            if len(rows) and (len(rows) + 1) * width + packed > self.limits.batch_tokens:
                return
            self._next = None
            try:
                row = Row(self.compressor, answer.memory, answer.prompt, answer.job.new_tokens)
                rows.join(row)
                answers[row] = answer
            except BaseException as error:
                self._finish(answer.job, error)

    def _ready(self) -> _Answer | None:
        """The next question with its memory and tokens; None: there is none."""
        while (job := self._take(self._questions)) is not None:
            try:
                return self._prepared(job)
            except BaseException as error:
                self._finish(job, error)
        return None

    def _read(self, rows: Rows, answers: dict[Row, _Answer], writing: Sequence[Row], reading: Sequence[Row]) -> None:
        """One more token of answers, and a part of prompts; if that fails, each prompt is read by itself."""
        read: list[tuple[Row, Tensor]] | None = None
        try:
            read = rows.read({row: answers[row].writing.tokens[-1] for row in writing}, reading)
        except BaseException as error:
            apart = [part for part in ((writing, []), *(([], [row]) for row in reading)) if any(part)]
            if len(apart) == 1:
                for row in (*writing, *reading):
                    self._leave(rows, answers, row, error)
                return
        if read is None:
            # Here no error holds the tensors of the pass that failed any more.
            for part in apart:
                self._read(rows, answers, *part)
            return
        self.tokens += len(read)
        for row, logits in read:
            try:
                if answers[row].over(answers[row].choose(logits), self._ends):
                    self._leave(rows, answers, row)
            except BaseException as error:
                self._leave(rows, answers, row, error)

    def _leave(self, rows: Rows, answers: dict[Row, _Answer], row: Row, error: BaseException | None = None) -> None:
        rows.leave(row)
        self._finish(answers.pop(row).job, error)

    def _prepared(self, job: Question) -> _Answer:
        """Finds the memory of a question and its token ids."""
        memory, prompt = self._found(job.memories), self._tokens(job.turns)
        if memory is None and self.tokenizer.bos_token_id is not None:
            prompt.insert(0, self.tokenizer.bos_token_id)
        end = len(prompt) + job.new_tokens
        if memory is not None:
            lead = self.compressor.task_embedding("qa", memory).shape[1]
            end += memory.starts[0] + lead + len(memory.rest[0])
        if end > self._positions:
            raise Refused(
                400,
                f"messages: expected memory, messages and answer within the model's {self._positions} positions, "
                f"got {end}",
                "messages",
                code="context_length_exceeded",
            )
        return _Answer(job, memory, prompt, partial(self.tokenizer.decode, skip_special_tokens=True))

    def _found(self, names: Sequence[str]) -> Memory | None:
        """The memory of a question, of several one; None: it asks about none."""
        memories, held = list[Memory](), 0
        try:
            for name in names:
                entry = self.repository.entry(name)
                held += entry.memory_tokens + (entry.rest or 0)
            # Others wait while they are read.
            if len(names) > 1 and held > self._positions:
                raise Refused(
                    400,
                    f"memory: expected memories of at most {self._positions} tokens in all, got {held}",
                    "memory",
                    code="context_length_exceeded",
                )
            for name in names:
                memories.append(self.repository.get(name))
        except KeyError:
            raise Refused(
                404, f"memory: expected the id of a memory, got {name[:80]!r}", "memory", code="memory_not_found"
            ) from None
        except (OSError, ValueError, MemoryError) as error:
            log.warning("a memory cannot be read: %s", error)
            raise Refused(503, "the memory cannot be read", "memory", code="storage_failed") from error
        if not memories:
            return None
        if (memory := self._known.get(tuple(names))) is None:
            try:
                memory = self.compressor.join(memories) if len(memories) > 1 else memories[0]
            except ValueError as error:
                raise Refused(400, f"memory: {str(error).removeprefix('memories: ')}", "memory") from error
            memory = self._known[tuple(names)] = memory.to(dtype=self.compressor.embed.weight.dtype)
        return memory

    def _tokens(self, turns: Sequence[str]) -> list[int]:
        """The token ids of a conversation, as `Conversation` reads one whose answers ended by themselves."""
        end = self.tokenizer.eos_token_id
        ids = self.turns.ids(self.tokenizer, turns[0], None)
        for answer, question in zip(turns[1::2], turns[2::2], strict=True):
            ids += text_ids(answer, self.tokenizer, special_tokens=False)
            ids += [end] if end is not None else []
            ids += self.turns.ids(self.tokenizer, question, ids[-1])
        return ids


def _twin(compressor: Compressor) -> Compressor:
    """A compressor of the same weights, which another thread may use at the same time."""
    # transformers writes RoPE's buffers in place where frequencies depend on the length of a pass.
    return copy.deepcopy(compressor, {id(one): one for one in compressor.parameters()})


def _refusal(error: BaseException) -> Exception:
    """What a client is told of an error, which is logged where it is the server's."""
    if isinstance(error, Refused | ValueError):
        return error
    if isinstance(error, OSError):
        log.warning("a request failed: %s", error)
        return storage_failed(error)
    log.error("a request failed", exc_info=error)
    return Refused(500, f"the server failed: {type(error).__name__}", code="failed")


def _refuse(jobs: Sequence[Job], error: Exception) -> None:
    """Tells those who still wait why they get nothing."""
    for job in jobs:
        if not job.cancelled:
            job.cancelled = True
            job.tell(error)
