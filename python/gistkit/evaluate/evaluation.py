"""evaluate: reconstruction, continuation and answers of a compressor over a data set, beside baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gistkit.common.checks import check_int
from gistkit.common.processes import Processes
from gistkit.compress import Compressor
from gistkit.evaluate.data import Example, prepare
from gistkit.evaluate.metrics import need
from gistkit.evaluate.report import Report
from gistkit.evaluate.runner import Runner


def evaluate(compressor: Compressor, data: Sequence[Example], *, method: str | None = None, **settings: Any) -> Report:
    """A report of one row on a compressor's memory.

    Args:
        compressor: a Compressor, or a baseline.
        data: the examples.
        method: the name of the row; None: the compressor's class, layout and ratio.
        settings: the other arguments of `compare`.
    """
    return compare({method or method_name(compressor): compressor}, data, **settings)


def compare(
    methods: Sequence[Compressor] | Mapping[str, Compressor],
    data: Sequence[Example],
    *,
    tokenizer: Any | None = None,
    tasks: Sequence[str] = ("ae", "lm", "qa"),
    batch_size: int = 8,
    max_new_tokens: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    progress: bool = True,
    processes: Processes | None = None,
) -> Report:
    """A report on the same examples for every method, one row each.

    Every context is encoded once for all tasks. Generation is greedy. Up to rounding, the figures do not depend on the
    batch size. The end token of a compressor does not count in the losses, so that all methods predict the same tokens.

    - "ae": loss, perplexity and accuracy of the context's tokens, each predicted from the true ones before it, and
      BLEU-4 of the greedy reconstruction, which is as long as the context unless the end token comes first. If a
      compressor has a window, only the compressed tokens count.
    - "lm": loss and perplexity of the continuation's tokens. If there is a method in place among them, whose encoder
      predicts the first one with a state that has read the whole context, all methods are measured from the second on.
    - "qa": loss and perplexity of the tokens of the first right answer after the question (GistPool, section 3; an end
      token after it does not count). F1 of ROUGE-1, ROUGE-2 and ROUGE-L, exact match and token F1 of the greedy answer,
      up to a stop token or, where no right answer has several lines, the end of its first line. Of the output up to a
      stop token: corpus BLEU-4 against all right answers (the compression-loss paper's measure on PwC, which does not
      say how it was tokenised), and accuracy, the share of questions where it contains an answer (`contains_answer`).

    Args:
        methods: the methods by name, or a list, whose names are class, layout and ratio: compressors, baselines, or
            what has their `model`, `encode`, `decode`, `logits` and `generate`.
        data: examples; those without a continuation or question are left out of that task.
        tokenizer: of transformers, for examples of text and to decode generated tokens; without one, BLEU and the
            answers' scores use token ids as words.
        tasks: some of "ae", "lm" and "qa".
        batch_size: examples at a time, of about the same length.
        max_new_tokens: most tokens generated; None: the context's length for "ae", 64 for "qa". A shorter
            reconstruction is compared with as many of the context's first tokens.
        stop_tokens: ids that end an answer; None: the tokenizer's end token.
        progress: whether to show progress bars.
        processes: those that share the batches; each calls this with the same arguments and gets the same report.
            None: only this one.

    Raises:
        ValueError: if an argument is out of range, there is nothing to measure for a task, or a question has no answer.
        ImportError: if a library that a task needs is missing; it names the extra.
    """
    if not isinstance(methods, Mapping):
        methods = _named(methods)
    if not methods:
        raise ValueError("methods: expected at least one, got none")
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value is not None:
            check_int(name, value)
    rows = prepare(data, tokenizer, tasks)
    skipped = int(any(getattr(reader, "encoder_predicts_first", False) for reader in methods.values()))
    if "lm" in tasks:
        rows = [row if len(row.continuation) > skipped else replace(row, continuation=[]) for row in rows]
        if not any(row.has("lm") for row in rows):
            raise ValueError(
                "data: expected a continuation of at least 2 tokens for a method in place, which is measured from the "
                "second one on, got none that long"
            )
    # Missing packages raise an error before an hour of work, not after it.
    for module in [
        *(["sacrebleu"] if {"ae", "qa"} & {*tasks} else []),
        *(["rouge_score.rouge_scorer", "text_to_num"] if "qa" in tasks else []),
        *(["tqdm"] if progress else []),
    ]:
        need(module)
    if stop_tokens is None:
        end = getattr(tokenizer, "eos_token_id", None)
        stop_tokens = () if end is None else (end,)
    runner = Runner(
        rows,
        tokenizer,
        tuple(tasks),
        batch_size,
        max_new_tokens,
        tuple(stop_tokens),
        skipped,
        progress,
        processes or Processes(),
    )
    settings = {
        "tasks": list(tasks),
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "stop_tokens": list(stop_tokens),
        "tokenizer": None if tokenizer is None else display_name(tokenizer),
        "methods": {name: _description(reader) for name, reader in methods.items()},
    }
    return Report(tuple(runner.row(name, reader) for name, reader in methods.items()), settings)


def method_name(reader: Any) -> str:
    """The name of a row: the reader's `title`, or its class."""
    title = getattr(reader, "title", None)
    return title if isinstance(title, str) else type(reader).__name__


def _description(reader: Compressor) -> dict[str, Any]:
    """The model and the settings of a method, those that it has."""
    model = reader.model
    names = ["end_token", "start_token", "task_tokens"]
    if not hasattr(reader, "task_tokens"):
        names += ["layout", "ratio", "chunk", "memory_tokens", "window"]
    elif getattr(reader, "ratio", 1) != 1:
        names.append("ratio")
    described = {name: getattr(reader, name, None) for name in names}
    # A method in place makes its layout, where others have the name of one.
    described = {name: value for name, value in described.items() if value is not None and not callable(value)}
    described["class"] = type(reader).__name__
    described["model"] = display_name(model)
    return described | {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}


def display_name(loaded: Any) -> str:
    """The name of a model or tokenizer; for a local path, its last part."""
    name = str(getattr(loaded, "name_or_path", "") or type(loaded).__name__)
    return Path(name).name if Path(name).is_absolute() else name


def _named(readers: Sequence[Compressor]) -> dict[str, Compressor]:
    by_name: dict[str, Compressor] = {}
    for reader in readers:
        name = method_name(reader)
        if name in by_name:
            raise ValueError(f"methods: expected different names, got two called {name!r}; pass them by name in a dict")
        by_name[name] = reader
    return by_name
