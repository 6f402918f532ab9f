"""Runner: evaluates one method on all examples, for one row of `compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gistkit.common.checks import IGNORE, padded
from gistkit.common.processes import Processes
from gistkit.compress.compressor import Compressor
from gistkit.compress.memory import Task
from gistkit.compress.tokens import pad
from gistkit.evaluate.data import Prepared, words_of
from gistkit.evaluate.metrics import (
    bleu4,
    contains_answer,
    exact_match,
    need,
    rouge1_f1,
    rouge2_f1,
    rougel_f1,
    token_f1,
)
from gistkit.evaluate.report import ExampleResult, Row, summary
from gistkit.hf import attach
from gistkit.hf.modes import eval_mode

ANSWER_TOKENS = 64
LOGIT_ROWS = 512


@contextmanager
def evaluating(compressor: Compressor) -> Iterator[None]:
    """Eval mode and gistkit's attention inside; afterwards all modules have their own mode again."""
    # What reads as a compressor does need not be a module.
    root = compressor if isinstance(compressor, nn.Module) else compressor.model
    with eval_mode(root), torch.no_grad(), attach(compressor.model):
        yield


@dataclass(frozen=True)
class Runner:
    """The examples and settings of one evaluation; `skipped` first tokens of continuations are not measured."""

    rows: list[Prepared]
    tokenizer: Any | None
    tasks: tuple[str, ...]
    batch_size: int
    max_new_tokens: int | None
    stop_tokens: tuple[int, ...]
    skipped: int
    progress: bool
    processes: Processes

    @cached_property
    def batches(self) -> list[list[int]]:
        """The examples of each batch, the longest first: one that does not fit in memory fails at once."""
        order = sorted(range(len(self.rows)), key=lambda index: -len(self.rows[index].context))
        return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]

    def row(self, name: str, compressor: Compressor) -> Row:
        """The row of one method, over all examples."""
        started = perf_counter()
        results: dict[int, ExampleResult] = {}
        measure: dict[str, Callable[[Compressor, Any, list[int], dict[int, ExampleResult]], None]]
        measure = {"ae": self._reconstruct, "lm": self._continue, "qa": self._answer}
        with evaluating(compressor), self._bar(name) as advance:
            for batch in self.processes.share(self.batches):
                memory = compressor.encode([self.rows[index].context for index in batch])
                results |= zip(batch, _sizes(memory), strict=True)
                for task in self.tasks:
                    positions = [position for position, index in enumerate(batch) if self.rows[index].has(task)]
                    if positions:
                        part = memory if len(positions) == len(batch) else memory[positions]
                        measure[task](compressor, part, [batch[position] for position in positions], results)
                        advance(len(positions))
        for part in self.processes.gathered(results):
            results |= part
        ordered = [results[index] for index in range(len(self.rows))]
        metrics, counts = summary(ordered)
        if "ae" in self.tasks:
            metrics["ae_bleu4"] = reconstruction_bleu(ordered, self.tokenizer)
        if "qa" in self.tasks:
            metrics["qa_bleu4"] = answer_bleu(ordered, self.tokenizer)
        return Row(name, metrics, counts, perf_counter() - started, tuple(ordered))

    @contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[int], Any]]:
        if not (self.progress and self.processes.is_first):
            yield lambda count: None
            return
        rows = (self.rows[index] for batch in self.processes.share(self.batches) for index in batch)
        total = sum(row.has(task) for row in rows for task in self.tasks)
        with need("tqdm").tqdm(total=total, desc=name, unit="text") as bar:
            yield bar.update

    def _reconstruct(
        self, compressor: Compressor, memory: Any, batch: list[int], results: dict[int, ExampleResult]
    ) -> None:
        # Tokens after a compressor's window are not reconstructed.
        contexts = [
            self.rows[index].context[:length] for index, length in zip(batch, memory.context_lengths, strict=True)
        ]
        for index, (nats, correct) in zip(batch, scored_tokens(compressor, memory, "ae", contexts), strict=True):
            result = results[index]
            result.ae_nats, result.ae_tokens, result.ae_correct = float(nats.sum()), len(nats), int(correct.sum())
        end = getattr(compressor, "end_token", None)
        stops = () if end is None else (int(end),)
        lengths = [min(len(context), self.max_new_tokens or len(context)) for context in contexts]
        generated = greedy_rows(compressor, memory, "ae", None, max(lengths), stops)
        for index, context, length, row in zip(batch, contexts, lengths, generated, strict=True):
            results[index].reconstruction = words_of(row[:length], self.tokenizer)
            results[index].original = words_of(context[:length], self.tokenizer)

    def _continue(
        self, compressor: Compressor, memory: Any, batch: list[int], results: dict[int, ExampleResult]
    ) -> None:
        targets = [self.rows[index].continuation for index in batch]
        for index, (nats, _) in zip(batch, scored_tokens(compressor, memory, "lm", targets), strict=True):
            measured = nats[self.skipped :]
            results[index].lm_nats, results[index].lm_tokens = float(measured.sum()), len(measured)

    def _answer(self, compressor: Compressor, memory: Any, batch: list[int], results: dict[int, ExampleResult]) -> None:
        questions = [self.rows[index].question for index in batch]
        right = [self.rows[index].question + self.rows[index].answer for index in batch]
        for index, question, (nats, _) in zip(
            batch, questions, scored_tokens(compressor, memory, "qa", right), strict=True
        ):
            answer = nats[len(question) :]
            results[index].qa_nats, results[index].qa_tokens = float(answer.sum()), len(answer)
        most = self.max_new_tokens or ANSWER_TOKENS
        generated = greedy_rows(compressor, memory, "qa", questions, most, self.stop_tokens)
        for index, row in zip(batch, generated, strict=True):
            output, answers = words_of(row, self.tokenizer).strip(), self.rows[index].answers
            prediction = prediction_of(output, answers)
            result = results[index]
            result.output, result.prediction, result.answers = output, prediction, answers
            for score in (rouge1_f1, rouge2_f1, rougel_f1, exact_match, token_f1):
                setattr(result, score.__name__, score(prediction, answers))
            result.contains_answer = contains_answer(output, answers)


def prediction_of(output: str, answers: Sequence[str]) -> str:
    """What is scored of an output: its first line, or all of it where a right answer has more, such as highlights."""
    if not output or any(len(answer.strip().splitlines()) > 1 for answer in answers):
        return output
    return output.splitlines()[0].strip()


def reconstruction_bleu(results: Sequence[ExampleResult], tokenizer: Any | None) -> float:
    """Corpus BLEU-4, 0..100, of what was reconstructed; without a tokenizer each id is a word."""
    originals = [result.original or "" for result in results]
    return _bleu([result.reconstruction or "" for result in results], originals, tokenizer)


def answer_bleu(results: Sequence[ExampleResult], tokenizer: Any | None) -> float:
    """Corpus BLEU-4, 0..100, of whole outputs and all right answers; without a tokenizer each id is a word."""
    answered = [result for result in results if result.output is not None]
    return _bleu([result.output or "" for result in answered], [result.answers or () for result in answered], tokenizer)


def _bleu(outputs: Sequence[str], references: Sequence[str | Sequence[str]], tokenizer: Any | None) -> float:
    return bleu4(outputs, references, tokenize="none" if tokenizer is None else "13a")


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Ids at which what is generated ends: the ends of sequence of the tokenizer and of the model's configuration."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({index for index in (*ids, getattr(tokenizer, "eos_token_id", None)) if index is not None})


def _sizes(memory: Any) -> list[ExampleResult]:
    """Tokens and cache bytes that stand for each context: every one takes what a context token takes."""
    context = sum(int(length) for length in memory.context_lengths)
    token_bytes = memory.full_cache_bytes / context if context else 0.0
    token_counts = getattr(memory, "tokens_read", None)
    if token_counts is None:
        sizes = getattr(memory, "sizes", memory.lengths)
        token_counts = [int(size) + len(remainder) for size, remainder in zip(sizes, memory.rest, strict=True)]
    return [ExampleResult(tokens, tokens * token_bytes) for tokens in token_counts]


def scored_tokens(
    compressor: Compressor, memory: Any, task: Task, rows: Sequence[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Of each row the nats float64 [T] of its tokens, given the true ones before, and which are the first guess."""
    device = compressor.model.device
    targets = padded(rows, IGNORE, device)
    inputs = pad([row[:-1] for row in rows], device)
    hidden_states = compressor.decode(memory, task, inputs.ids, inputs.valid)
    is_token = targets != IGNORE
    states, labels = hidden_states[is_token], targets[is_token]
    nats, correct = [], []
    for part, part_labels in zip(states.split(LOGIT_ROWS), labels.split(LOGIT_ROWS), strict=True):
        logits = compressor.logits(part)
        nats.append(F.cross_entropy(logits, part_labels, reduction="none").double())
        correct.append(logits.argmax(-1) == part_labels)
    lengths = [len(row) for row in rows]
    return list(zip(torch.cat(nats).split(lengths), torch.cat(correct).split(lengths), strict=True))


def greedy_rows(
    compressor: Compressor,
    memory: Any,
    task: Task,
    prompts: Sequence[list[int]] | None,
    most: int,
    stops: tuple[int, ...],
) -> list[list[int]]:
    """Greedy tokens of each row up to its first stop token, which is left out."""
    prompt = None if prompts is None else pad(prompts, compressor.model.device)
    generated = compressor.generate(
        memory,
        None if prompt is None else prompt.ids,
        None if prompt is None else prompt.valid,
        task=task,
        max_new_tokens=most,
        stop_tokens=stops,
        # Rows that have ended are filled with a stop token, at which they are cut.
        pad_token=stops[0] if stops else 0,
    )
    rows = []
    for row in generated.tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row))
        rows.append(row[:end])
    return rows
