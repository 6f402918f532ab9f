"""read_on: the loss of a language model that compresses its past, beside the plain model with as many states or all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from gistkit.common.processes import Processes
from gistkit.compress import LanguageModel
from gistkit.evaluate.evaluation import display_name
from gistkit.evaluate.metrics import perplexity
from gistkit.evaluate.report import Report, Row
from gistkit.evaluate.runner import LOGIT_ROWS, evaluating
from gistkit_lab.evaluate.recent import Recent
from gistkit_lab.evaluate.words import WordLoss, check_excluded, word_loss

BASELINES = ("recent", "full")


def read_on(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    asked: int,
    *,
    baselines: Sequence[str] = BASELINES,
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
        batch_size: texts at a time.
        progress: whether to show a progress bar.
        tokenizer: of transformers, for the perplexity of words.
        excluded_words: words that it leaves out, such as ("<unk>",) for WikiText; (): none. None: it is not measured.
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
    compressor, parts = model.compressor, processes.share(_batches(texts, batch_size))
    total = (1 + len(set(baselines))) * sum(map(len, parts))
    hidden = not (progress and processes.is_first)

    def row(name: str, reader: LanguageModel) -> Row:
        bar.set_description(name)
        clock = time.perf_counter()
        scored = processes.joined(
            [_scored(reader, part, asked, tokenizer, excluded_words, bar.update) for part in parts]
        )
        return _row(name, [text for part in scored for text in part], excluded_words is not None, clock)

    with evaluating(compressor), tqdm(total=total, unit="text", dynamic_ncols=True, disable=hidden) as bar:
        rows = [row(model.title, model)]
        if "recent" in baselines:
            # BOS is a state too.
            recent = Recent(compressor, max(1, round(rows[0].metrics["states"]) - 1))
            rows.append(row(recent.title, recent))
        if "full" in baselines:
            rows.append(row("FullContext", Recent(compressor, 1 + max(map(len, texts)))))
    settings: dict[str, Any] = {"asked": asked, "batch_size": batch_size, "model": display_name(compressor.model)}
    return Report(tuple(rows), settings | {"method": model.settings})


def last_tokens(
    model: LanguageModel, texts: Sequence[Sequence[int]] | Tensor, asked: int, *, batch_size: int = 8
) -> tuple[float, float, int]:
    """Of the last `asked` tokens of texts the mean loss in nats, the mean number of states, and the number of tokens.

    The arguments are those of `read_on`.
    """
    _check(texts, asked, batch_size)
    scored = [text for part in _batches(texts, batch_size) for text in _scored(model, part, asked)]
    count = sum(text.tokens for text in scored)
    return sum(text.nats for text in scored) / count, sum(text.states for text in scored) / count, count


class _Scored(NamedTuple):
    """The sums over the last tokens of a text."""

    nats: float
    states: float
    tokens: int
    words: WordLoss


@torch.no_grad()
def _scored(
    model: LanguageModel,
    texts: Sequence[Sequence[int]] | Tensor,
    asked: int,
    tokenizer: Any = None,
    excluded_words: Sequence[str] | None = None,
    on_batch: Callable[[int], Any] = lambda count: None,
) -> list[_Scored]:
    """Of each text of a batch."""
    scored = []
    rows = model.rows(texts if isinstance(texts, Tensor) else [list(text) for text in texts])
    hidden_states, states = model.hidden(rows), model.states(rows)
    for row, end in enumerate(rows.lengths):
        # A token is predicted at the one before it; a BOS at the start of a text is not predicted.
        before = slice(max(end - asked, 1) - 1, end - 1)
        targets = rows.ids[row, before.start + 1 : end]
        parts = zip(hidden_states[row, before].split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        losses = torch.cat(
            [F.cross_entropy(model.compressor.logits(part), ids, reduction="none").double() for part, ids in parts]
        )
        words = WordLoss()
        if excluded_words is not None:
            ids, start = rows.ids[row, :end].tolist(), end - len(losses)
            words = word_loss(tokenizer, ids[start:], losses.tolist(), before=ids[:start], excluded=excluded_words)
        scored.append(_Scored(float(losses.sum()), float(states[row, before].sum()), len(losses), words))
    on_batch(len(rows.lengths))
    return scored


def _batches(texts: Sequence[Sequence[int]] | Tensor, size: int) -> list[Sequence[Sequence[int]] | Tensor]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def _check(texts: Sequence[Sequence[int]] | Tensor, asked: int, batch_size: int) -> None:
    for name, value in (("asked", asked), ("batch_size", batch_size), ("texts", len(texts))):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    for index, text in enumerate(texts):
        if len(text) < asked:
            raise ValueError(f"texts: expected at least the {asked} tokens asked, got {len(text)} in text {index}")


def _row(name: str, scored: Sequence[_Scored], with_words: bool, clock: float) -> Row:
    count, words = sum(text.tokens for text in scored), sum((text.words for text in scored), WordLoss())
    nats, states = sum(text.nats for text in scored) / count, sum(text.states for text in scored) / count
    metrics = {"lm_loss": nats, "lm_perplexity": perplexity(nats), "states": states}
    counts = {"examples": len(scored), "lm_tokens": count}
    if with_words:
        counts |= {"lm_words": words.words, "lm_excluded_words": words.excluded}
        if words.words:
            metrics["lm_word_perplexity"] = words.perplexity
    return Row(name, metrics, counts, time.perf_counter() - clock)
