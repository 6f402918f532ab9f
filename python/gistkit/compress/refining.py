"""refine: trains a memory for its text, until the model predicts from it what it predicts from the full text."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gistkit.common.checks import POSITIONS, check_float, check_int
from gistkit.common.text_ids import filled_ids, text_ids
from gistkit.compress.compressor import Compressor
from gistkit.compress.generation import stop_ids
from gistkit.compress.losses import divergence_loss
from gistkit.compress.memory import Memory, check_memory
from gistkit.compress.methods.select import Select
from gistkit.compress.scores.kvzip import KVzip
from gistkit.compress.tokens import QUESTION, Rows, batches, pad, texts_of
from gistkit.hf.modes import eval_mode

# How the model's own questions begin.
OPENINGS = ("What", "Which", "Who", "When", "Where", "Why", "How many", "What does")
# Tokens of a passage; passages that are recited, sentences that are completed, questions and continuations at most;
# tokens of a step.
PIECE, PASSAGES, SENTENCES, QUESTIONS, CONTINUATIONS, STEP = 64, 64, 48, 32, 4, 128
# Words of a sentence at least, and tokens of its end at most.
WORDS, END = 5, 16
# Passages that are asked about at a time, without a limit of seconds.
TOGETHER = 4
# Tokens of a continuation at least.
LEAST = 8
# The parts of the seconds after which continuations, questions and the reading of both with the whole text end.
CONTINUING, WRITING, READING = 0.2, 0.4, 0.55
STEPS = 100
# Settings of a selection that keeps a whole context.
EVERYTHING: dict[str, Any] = {
    "by": "even", "question": None, "budget": None, "shares": "equal", "part": 0, "positions": "kept", "fit": False,
}  # fmt: skip


class Clock:
    """What is spent of a limit of seconds, of which None never ends."""

    def __init__(self, seconds: float | None) -> None:
        self.limit = math.inf if seconds is None else seconds
        self.begun = time.monotonic()

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.limit < math.inf

    @property
    def spent(self) -> float:
        """The part of the limit that is over; 1: all of it."""
        return (time.monotonic() - self.begun) / self.limit

    def stopping(self, part: float) -> dict[str, Any]:
        """Options with which `generate` looks at the clock after each token."""

        def late(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(ids),), ids.shape[1] >= LEAST and self.spent > part, device=ids.device)

        return {"stopping_criteria": [late]} if self.limited else {}


class Exercise(NamedTuple):
    """A text that is read with the memory: its tokens, from which of them on they are predicted, and how well.

    Args:
        states: [len(ids) - first, d], the hidden states that predict them after the whole text.
    """

    ids: list[int]
    first: int
    states: Tensor


@dataclass(frozen=True)
class Refined:
    """What `refine` returns.

    Args:
        memory: the trained memory, or the given one if that is better.
        before, after: mean KL(full text || memory) in nats a token, on held-out questions, answers and continuations.
        steps: number of training steps.
        texts: number of texts that were trained on.
    """

    memory: Memory
    before: float
    after: float
    steps: int
    texts: int


def refine(
    compressor: Compressor,
    memory: Memory,
    text: str | Sequence[int],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    rate: float = 5e-3,
    seed: int = 0,
    control_tokens: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Refined:
    """Trains a memory for its text, starting from the given one, as Cartridges do (Eyuboglu et al., arXiv 2506.06266).

    The teacher is the model with the full text. It recites passages, completes sentences, continues the text, and
    answers questions that it wrote itself about passages. The memory's keys and values, or embeddings, are trained so
    that the model predicts the same from them: Adam on the Kullback-Leibler divergence of the next tokens. The
    compressor does not change, and the result is an ordinary memory. With only `steps` the result is reproducible.

    Args:
        compressor: reads the memory; the teacher uses the same adapter for reading.
        memory: the memory of this text, one row.
        text: the text or token ids that were compressed; only the number of tokens is checked. The compressor needs its
            tokenizer.
        seconds: limit for the whole call, at least 1. A pass over the text, a few exercises and one step always run,
            even if they take longer.
        steps: number of training steps, of at most 128 tokens each. None: 100, or as many as `seconds` allow.
        rate: learning rate; it rises over 5 steps and falls to a tenth.
        seed: random seed of the passages, questions and continuations.
        control_tokens: as in `compress`.
        progress: called with the share that is done, from 0 to 1.

    Raises:
        ValueError: for a memory of several rows or of a text of another length, or if there is no tokenizer.
    """
    clock = Clock(None if seconds is None else check_float("seconds", seconds, 1))
    ids = _checked(compressor, memory, text, control_tokens)
    rate = check_float("rate", rate, 0)
    if steps is None:
        steps = STEPS if seconds is None else POSITIONS
    steps = check_int("steps", steps)
    with torch.inference_mode(False), torch.no_grad(), _undisturbed(compressor):
        exercises, held = _exercises(compressor, ids, random.Random(seed), clock)
        started = clock.spent
        before = _divergence(compressor, memory, held)
        # The parts of the seconds that the same takes at the end, and that a step takes.
        measuring, step, taken = clock.spent - started, 0.0, 0
        trained = [tensor.clone().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in memory.tensors]
        adam = torch.optim.Adam([tensor.requires_grad_() for tensor in trained], betas=(0.9, 0.95))
        order = random.Random(seed)
        queue: list[list[int]] = []
        while taken < steps:
            started = clock.spent
            if taken and started + step + measuring > 1:
                break
            if not queue:
                queue = list(batches([len(exercise.ids) for exercise in exercises], STEP))
                order.shuffle(queue)
            left = 1 - max(taken / steps, started)
            adam.param_groups[0]["lr"] = rate * min((taken + 1) / 5, max(0.1, left))
            batch = [exercises[index] for index in queue.pop()]
            with torch.enable_grad():
                loss = _loss(compressor, _holding(memory, trained), batch)
                loss.backward(inputs=trained)
            adam.step()
            adam.zero_grad()
            taken += 1
            step = clock.spent - started
            if progress is not None:
                progress(min(1.0, max(taken / steps, started + step)))
        result = _holding(memory, [tensor.detach() for tensor in trained])
        after = _divergence(compressor, result, held)
        # A loss that is no number is no gain either.
        if not after < before:
            result, after = memory, before
        return Refined(result, before, after, taken, len(exercises))


@contextmanager
def _undisturbed(compressor: Compressor) -> Iterator[None]:
    """Inside, all modules are in eval mode; afterwards they and torch's random numbers are as before."""
    trains = compressor.training
    with torch.random.fork_rng([compressor.device] if compressor.device.type == "cuda" else []), eval_mode(compressor):
        try:
            yield
        finally:
            if trains:
                # What answers have kept.
                compressor.lm.release()


def _checked(compressor: Compressor, memory: Memory, text: str | Sequence[int], control_tokens: bool) -> list[int]:
    """The text's token ids, without padding."""
    check_memory(memory)
    if memory.batch_size != 1:
        raise ValueError(f"memory: expected one row, of the text, got {memory.batch_size} rows")
    compressor.check_readable(memory)
    ids: Any = text
    if isinstance(text, str):
        ids = text_ids(texts_of("text", text)[0], compressor.tokenizer, control_tokens=control_tokens)
    (row,) = compressor.contexts(ids).lists()
    expected = memory.context_lengths[0] + len(memory.rest[0])
    if len(row) != expected:
        raise ValueError(f"text: expected the {expected} tokens that the memory is of, got {len(row)}")
    return row


def _holding(memory: Memory, tensors: Sequence[Tensor]) -> Memory:
    """The memory with other numbers."""
    tensors = [tensor.to(memory.dtype) for tensor in tensors]
    if memory.embeddings is not None:
        return replace(memory, embeddings=tensors[0])
    return replace(memory, layers=tuple(zip(tensors[::2], tensors[1::2], strict=True)))


def _exercises(
    compressor: Compressor, ids: list[int], draw: random.Random, clock: Clock
) -> tuple[list[Exercise], list[Exercise]]:
    """What trains the memory, and what measures it, with the states of the model that reads the whole text."""
    rows = compressor.uncompressed(pad([ids], compressor.device))
    # It keeps all keys of a context, which has its first token already.
    if isinstance(compressor, Select):
        # One adapter may read contexts, and another what follows.
        teacher = compressor.changed(**EVERYTHING).at(1)
    else:
        teacher = Select(compressor.model, ratio=1, by="even", bos_token=int(rows.known[0, 0])).eval()
        teacher.tokenizer = compressor.tokenizer
    with compressor.using(compressor.reader):
        whole_text = teacher.compress_rows(rows)[0]
        recited = [*_passages(ids, draw, compressor.tokenizer), *_sentences(ids, draw, compressor.tokenizer)]
        written = [*_continuations(teacher, whole_text, draw, clock), *_questions(teacher, rows, draw, clock)]
        # One in four of what the model wrote is kept apart.
        apart = range(0, len(written), 4)
        groups = [*recited, *(one for index, one in enumerate(written) if index not in apart)]
        held = _read_whole(teacher, whole_text, written[::4], draw, clock)
        return _read_whole(teacher, whole_text, groups, draw, clock), held


def _passages(ids: list[int], draw: random.Random, tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Passages of the text after the request to repeat them."""
    found = list(KVzip(chunk=PIECE).repetitions(ids, tokenizer))
    for part, words in draw.sample(found, min(PASSAGES, len(found))):
        yield words, len(words) - (part.stop - part.start)


def _sentences(ids: list[int], draw: random.Random, tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Sentences of the text, or lines, whose beginning is the question and whose end is the answer.

    A model writes few questions that ask for what the text says; these ask for all of it.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = [words for part in re.split(r"(?<=[.!?])\s+|\n", text) if len(words := part.split()) >= WORDS]
    for words in draw.sample(found * SENTENCES, SENTENCES) if found else ():
        cut = draw.randint(len(words) // 3 + 1, len(words) - 2)
        question = filled_ids(QUESTION, "{question}", " ".join(words[:cut]), tokenizer)
        end = text_ids(" ".join(words[cut:]), tokenizer, special_tokens=False)
        yield question + end[:END], len(question)


def _continuations(
    teacher: Select, memory: Memory, draw: random.Random, clock: Clock
) -> Iterator[tuple[list[int], int]]:
    """What the model says next, drawn from all that it might."""
    generator = torch.Generator(teacher.device).manual_seed(draw.randrange(2**31))
    memory = memory.repeat(CONTINUATIONS)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": PIECE, "stop_tokens": (), "generator": generator}
    yield from ((row, 1) for row in teacher.generate(memory, **options, **clock.stopping(CONTINUING)).tolist())


def _questions(teacher: Select, rows: Rows, draw: random.Random, clock: Clock) -> Iterator[tuple[list[int], int]]:
    """Questions and answers that the model writes with one passage before it."""
    (ids,), tokenizer = rows.lists(), teacher.tokenizer
    starts = range(0, len(ids), PIECE)
    chosen = draw.sample(starts, min(QUESTIONS // 4, len(starts)))
    each = QUESTIONS // len(chosen)
    head = QUESTION.partition("{question}")[0]
    generator = torch.Generator(teacher.device).manual_seed(draw.randrange(2**31))
    ends = {*stop_ids(teacher.lm, None), tokenizer.eos_token_id} - {None}
    together, stopping = 1 if clock.limited else TOGETHER, clock.stopping(WRITING)
    for first in range(0, len(chosen), together):
        if clock.spent > WRITING:
            return
        pieces = [ids[start : start + PIECE] for start in chosen[first : first + together] for _ in range(each)]
        openings = [draw.choice(OPENINGS) for _ in pieces]
        memory = teacher.compress_rows(pad(pieces, teacher.device))[0]
        begun = [text_ids(head + opening, tokenizer, special_tokens=False) for opening in openings]
        drawn = teacher.generate(
            memory,
            begun,
            task="qa",
            do_sample=True,
            temperature=0.7,
            max_new_tokens=24,
            generator=generator,
            **stopping,
        )
        if clock.spent > WRITING:
            return
        said = tokenizer.batch_decode(drawn, skip_special_tokens=True)
        lines = [(opening + words).splitlines()[0] for opening, words in zip(openings, said, strict=True)]
        asked = [filled_ids(QUESTION, "{question}", line.partition("?")[0] + "?", tokenizer) for line in lines]
        answers = teacher.generate(memory, asked, task="qa", max_new_tokens=32, stop_tokens=ends, **stopping).tolist()
        for question, answer in zip(asked, answers, strict=True):
            end = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
            yield question + answer[:end], len(question)


def _read_whole(
    teacher: Select, memory: Memory, texts: Sequence[tuple[list[int], int]], draw: random.Random, clock: Clock
) -> list[Exercise]:
    """Texts with the states that predict them, all for which there is time."""
    found: dict[int, Exercise] = {}
    groups = list(batches([len(ids) for ids, _ in texts], STEP if clock.limited else 4 * STEP))
    # Of all kinds and lengths where time ends it.
    draw.shuffle(groups)
    for batch in groups:
        if found and clock.spent > READING:
            break
        parts = _states(teacher, memory, [texts[index] for index in batch])
        found |= {index: Exercise(*texts[index], part) for index, part in zip(batch, parts, strict=True)}
    return [found[index] for index in sorted(found)]


def _states(reader: Compressor, memory: Memory, texts: Sequence[Any]) -> list[Tensor]:
    """The hidden states that predict each text's tokens from its first predicted one on."""
    rows = pad([text[0][:-1] for text in texts], reader.device)
    states = reader.read(memory.repeat(len(texts)), "qa", rows)
    return [row[text[1] : len(text[0])] for row, text in zip(states, texts, strict=True)]


def _loss(compressor: Compressor, memory: Memory, batch: Sequence[Exercise]) -> Tensor:
    """Mean KL(whole text || memory) of the predicted tokens."""
    student, teacher = _states(compressor, memory, batch), [exercise.states for exercise in batch]
    both = (compressor.lm.readout(torch.cat(states)) for states in (student, teacher))
    return divergence_loss(*both, **compressor.output_embedding)


def _divergence(compressor: Compressor, memory: Memory, exercises: Sequence[Exercise]) -> float:
    """`_loss` over any number of exercises."""
    total = 0.0
    for batch in batches([len(exercise.ids) for exercise in exercises], 4 * STEP):
        chosen = [exercises[index] for index in batch]
        total += float(_loss(compressor, memory, chosen)) * sum(len(one.states) for one in chosen)
    return total / sum(len(exercise.states) for exercise in exercises)
