"""read_on: the loss of a language model that compresses its past, beside the plain model with as many states or all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from gistkit.common.processes import Processes
from gistkit.compress import LanguageModel, Recent
from gistkit.evaluate.evaluation import display_name
from gistkit.evaluate.metrics import perplexity
from gistkit.evaluate.report import Report, Row
from gistkit.evaluate.runner import LOGIT_ROWS, evaluating
from gistkit.evaluate.words import WordLoss, check_excluded, word_loss

BASELINES = ("recent", "full")


def read_on(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    asked: int,
    *,
    baselines: Sequence[str] = BASELINES,
    method: str | None = None,
    batch_size: int = 8,
    progress: bool = True,
    tokenizer: Any | None = None,
    excluded_words: Sequence[str] | None = None,
    processes: Processes | None = None,
) -> Report:
    """Perplexity of the last tokens of texts, and the states kept for them: a report of a row each (Dodo, Table 1).

    Args:
        model: such as `gistkit.compress.MixedResolution` or `Compressive`.
        texts: token ids, at least `asked` in each.
        asked: the loss is the mean over so many tokens at each text's end.
        baselines: some of "recent", the plain model with as many last tokens as the model keeps states on average, and
            "full", the plain model with all tokens.
        method: the name of the model's row; None: its `title`.
        batch_size: texts at a time.
        progress: whether to show a progress bar.
        tokenizer, excluded_words: as in `compare`: the perplexity of complete words is measured too, but for these.
        processes: as in `compare`.

    Returns:
        Metrics "lm_loss", "lm_perplexity" and "states", the mean number of states that each of these tokens is
        predicted from; a mean counts as one. With `excluded_words` "lm_word_perplexity" too.

    Raises:
        ValueError: if an argument is out of range.
    """
    if isinstance(baselines, str) or not set(baselines) <= set(BASELINES):
        raise ValueError(f"baselines: expected some of {', '.join(BASELINES)}, got {baselines!r}")
    _check(texts, asked, batch_size)
    if excluded_words is not None:
        excluded_words = check_excluded(excluded_words)
        if tokenizer is None:
            raise ValueError("excluded_words: not allowed without a tokenizer, got some")
    processes = processes or Processes()
    asking = _Asking(texts, asked, batch_size, tokenizer, excluded_words, processes)
    compressor = model.compressor
    total = (1 + len(set(baselines))) * sum(map(len, processes.share(_batches(texts, batch_size))))
    hidden = not (progress and processes.is_first)
    with evaluating(compressor), tqdm(total=total, unit="text", dynamic_ncols=True, disable=hidden) as bar:
        rows = [_row(method or model.title, model, asking, bar)]
        if "recent" in baselines:
            # BOS is a state too.
            recent = Recent(compressor, max(1, round(rows[0].metrics["states"]) - 1))
            rows.append(_row(recent.title, recent, asking, bar))
        if "full" in baselines:
            full = Recent(compressor, 1 + max(map(len, texts)))
            rows.append(_row("FullContext", full, asking, bar))
    settings: dict[str, Any] = {"asked": asked, "batch_size": batch_size, "model": display_name(compressor.model)}
    return Report(tuple(rows), settings | {"method": model.settings})


class _Asking(NamedTuple):
    """What is asked of every model: the texts, how many of their tokens, and of which words."""

    texts: Sequence[Sequence[int]]
    asked: int
    batch_size: int
    tokenizer: Any | None
    excluded_words: tuple[str, ...] | None
    processes: Processes


@torch.no_grad()
def last_tokens(
    model: LanguageModel,
    texts: Sequence[Sequence[int]] | Tensor,
    asked: int,
    *,
    batch_size: int = 8,
) -> tuple[float, float, int]:
    """The loss of the last `asked` tokens of texts, and the states kept for them.

    Args:
        model, texts, asked, batch_size: as in `read_on`.

    Returns:
        Their mean loss in nats, the mean number of states for each, and the number of tokens.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check(texts, asked, batch_size)
    nats = state_count = 0.0
    count = 0
    for _, losses, states in _scored(model, _batches(texts, batch_size), asked):
        nats += float(losses.sum())
        state_count += states
        count += len(losses)
    return nats / count, state_count / count, count


@torch.no_grad()
def _scored(
    model: LanguageModel,
    parts: Sequence[Sequence[Sequence[int]] | Tensor],
    asked: int,
    on_batch: Callable[[int], Any] = lambda count: None,
) -> Iterator[tuple[list[int], Tensor, float]]:
    """Of each text its ids, the nats float64 of its last tokens, and the states kept for them together."""
    for part in parts:
        rows = model.rows(part if isinstance(part, Tensor) else [list(text) for text in part])
        hidden_states, states = model.hidden(rows), model.states(rows)
        for row, end in enumerate(rows.lengths):
            # A token is predicted at the one before it; a BOS at the start of a text is not predicted.
            before = slice(max(end - asked, 1) - 1, end - 1)
            targets = rows.ids[row, before.start + 1 : end]
            losses = [
                F.cross_entropy(model.compressor.logits(hidden_part), labels, reduction="none").double()
                for hidden_part, labels in zip(
                    hidden_states[row, before].split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True
                )
            ]
            yield rows.ids[row, :end].tolist(), torch.cat(losses), float(states[row, before].sum())
        on_batch(len(rows.lengths))


def _batches(texts: Sequence[Sequence[int]] | Tensor, size: int) -> list[Sequence[Sequence[int]] | Tensor]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def _check(texts: Sequence[Sequence[int]] | Tensor, asked: int, batch_size: int) -> None:
    for name, value in (("asked", asked), ("batch_size", batch_size), ("texts", len(texts))):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    for index, text in enumerate(texts):
        if len(text) < asked:
            raise ValueError(f"texts: expected at least the {asked} tokens asked, got {len(text)} in text {index}")


class _Scored(NamedTuple):
    """The sums over the last tokens of a text."""

    nats: float
    states: float
    tokens: int
    words: WordLoss


def _score(model: LanguageModel, texts: Sequence[Sequence[int]] | Tensor, asking: _Asking, bar: Any) -> list[_Scored]:
    """Of each text of a batch."""
    scored = []
    for ids, losses, states in _scored(model, [texts], asking.asked, bar.update):
        words = WordLoss()
        if asking.excluded_words is not None:
            start = len(ids) - len(losses)
            words = word_loss(
                asking.tokenizer, ids[start:], losses.tolist(), before=ids[:start], excluded=asking.excluded_words
            )
        scored.append(_Scored(float(losses.sum()), states, len(losses), words))
    return scored


def _row(name: str, model: LanguageModel, asking: _Asking, bar: Any) -> Row:
    bar.set_description(name)
    clock = time.perf_counter()
    parts = asking.processes.share(_batches(asking.texts, asking.batch_size))
    scored = asking.processes.joined([_score(model, part, asking, bar) for part in parts])
    nats = states = 0.0
    words, count = WordLoss(), 0
    for text in (text for part in scored for text in part):
        nats += text.nats
        states += text.states
        count += text.tokens
        words += text.words
    metrics = {"lm_loss": nats / count, "lm_perplexity": perplexity(nats / count), "states": states / count}
    counts = {"examples": len(asking.texts), "lm_tokens": count}
    if asking.excluded_words is not None:
        counts |= {"lm_words": words.words, "lm_excluded_words": words.excluded}
        if words.words:
            metrics["lm_word_perplexity"] = words.perplexity
    return Row(name, metrics, counts, time.perf_counter() - clock)
