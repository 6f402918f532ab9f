"""The report of an evaluation: a row of figures for each method, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from gistkit.common.files import write_text
from gistkit.evaluate.metrics import perplexity
from gistkit.info import machine

# Scores of an answer, by name.
ANSWER_SCORES = ("rouge1_f1", "rouge2_f1", "rougel_f1", "exact_match", "token_f1", "contains_answer")


@dataclass
class ExampleResult:
    """The result of one method on one example; None where the example, or the evaluation, lacks the task.

    Args:
        tokens_read: memory tokens, or plain tokens, that stand for the context.
        cache_bytes: their bytes in the decoder's cache.
        ae_nats, ae_tokens, ae_correct: summed cross entropy, tokens and right first guesses of the reconstruction,
            each token predicted from the true ones before it.
        reconstruction, original: the context as the method reconstructs it greedily, and as it is.
        lm_nats, lm_tokens: summed cross entropy and tokens of the continuation.
        qa_nats, qa_tokens: summed cross entropy and tokens of the first right answer, each token predicted from the
            true ones before it.
        output: the greedy generation after the question.
        prediction, answers: its first line, or all of it where a right answer has several lines; the right answers.
        rouge1_f1, rouge2_f1, rougel_f1, exact_match, token_f1: the prediction's scores, 0..1.
        contains_answer: 1 where the output contains an answer, else 0.
        judge: the judge's score of the prediction, 0..1; None too where it gave none.
    """

    tokens_read: int
    cache_bytes: float
    ae_nats: float | None = None
    ae_tokens: int | None = None
    ae_correct: int | None = None
    reconstruction: str | None = None
    original: str | None = None
    lm_nats: float | None = None
    lm_tokens: int | None = None
    qa_nats: float | None = None
    qa_tokens: int | None = None
    output: str | None = None
    prediction: str | None = None
    answers: tuple[str, ...] | None = None
    rouge1_f1: float | None = None
    rouge2_f1: float | None = None
    rougel_f1: float | None = None
    exact_match: float | None = None
    token_f1: float | None = None
    contains_answer: float | None = None
    judge: float | None = None


@dataclass(frozen=True)
class Row:
    """The figures of one method.

    Args:
        method: its name.
        metrics: by name, those of `COLUMNS` that were measured; losses in nats a token over all tokens, BLEU and
            answers' scores 0..100, tokens read and cache bytes as means over the examples. The judge's score is the
            mean over those that it gave, whose number is `counts["qa_judged"]`.
        counts: examples and predicted tokens of each task.
        seconds: time taken.
        examples: a Result for each example, in the order of the data; empty in a report that was read from a file
            saved without them.
    """

    method: str
    metrics: dict[str, float]
    counts: dict[str, int]
    seconds: float
    examples: tuple[ExampleResult, ...] = ()


# Metric, heading and form, in the order of the table.
COLUMNS = (
    ("ae_loss", "AE loss", "{:.3f}"),
    ("ae_perplexity", "AE PPL", "{:.2f}"),
    ("ae_accuracy", "AE accuracy", "{:.3f}"),
    ("ae_bleu4", "AE BLEU-4", "{:.2f}"),
    ("lm_loss", "LM loss", "{:.3f}"),
    ("lm_perplexity", "LM PPL", "{:.2f}"),
    ("lm_word_perplexity", "LM word PPL", "{:.2f}"),
    ("qa_loss", "QA loss", "{:.3f}"),
    ("qa_perplexity", "QA PPL", "{:.2f}"),
    ("qa_bleu4", "QA BLEU-4", "{:.2f}"),
    ("qa_rouge1_f1", "QA R-1", "{:.2f}"),
    ("qa_rouge2_f1", "QA R-2", "{:.2f}"),
    ("qa_rougel_f1", "QA R-L", "{:.2f}"),
    ("qa_exact_match", "QA EM", "{:.2f}"),
    ("qa_token_f1", "QA F1", "{:.2f}"),
    ("qa_contains_answer", "QA accuracy", "{:.2f}"),
    ("qa_vqa", "VQA accuracy", "{:.2f}"),
    ("qa_choice", "QA choices", "{:.2f}"),
    ("qa_judge", "QA judge", "{:.2f}"),
    ("states", "states a layer", "{:.1f}"),
    ("tokens_read", "tokens read", "{:.1f}"),
    ("cache_bytes", "cache KiB", "{:.1f}"),
    ("win", "win %", "{:.1f}"),
    ("lose", "lose %", "{:.1f}"),
    ("tie", "tie %", "{:.1f}"),
)


@dataclass(frozen=True)
class Report:
    """Rows by method, with settings and machine.

    Args:
        rows: one Row a method.
        settings: tasks, batch size and the other arguments of the evaluation.
        machine: as `gistkit.info.machine` gives it.
    """

    rows: tuple[Row, ...]
    settings: dict[str, Any]
    machine: dict[str, str | int] = field(default_factory=machine)

    def __getitem__(self, method: str) -> Row:
        """The row of a method; a KeyError names the existing ones."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"method: expected one of {', '.join(row.method for row in self.rows)}, got {method!r}")

    def as_dict(self, *, examples: bool = False) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, numbers and texts; single examples only with `examples`."""
        rows = []
        for row in self.rows:
            values = asdict(row)
            values["examples"] = [
                {key: value for key, value in example.items() if value is not None} for example in values["examples"]
            ]
            if not examples:
                del values["examples"]
            rows.append(values)
        return {"machine": self.machine, "settings": self.settings, "rows": rows}

    def save(self, path: str | Path, *, examples: bool = False) -> Path:
        """Writes JSON; an infinite perplexity becomes null, while its loss is written."""
        path = Path(path)
        content = finite(self.as_dict(examples=examples))
        write_text(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """A report that `save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(
                Row(
                    row["method"],
                    {name: math.inf if value is None else value for name, value in row["metrics"].items()},
                    row["counts"],
                    row["seconds"],
                    tuple(_result(example) for example in row.get("examples", ())),
                )
                for row in content["rows"]
            )
            return cls(rows, content["settings"], content["machine"])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected the report of an evaluation, got another file ({error})") from error

    def table(self) -> str:
        """The figures as a Markdown table with aligned columns, a row a method."""
        columns = [column for column in COLUMNS if any(column[0] in row.metrics for row in self.rows)]
        lines = [["method", *(heading for _, heading, _ in columns)]]
        return format_table([*lines, *(cells(row, columns) for row in self.rows)])

    def __str__(self) -> str:
        return self.table()


def summary(results: Sequence[ExampleResult]) -> tuple[dict[str, float], dict[str, int]]:
    """Metrics but BLEU, and counts, over all examples: losses weighted by tokens, answers by questions."""
    metrics: dict[str, float] = {}
    counts = {"examples": len(results)}
    for task in ("ae", "lm", "qa"):
        tokens = sum(getattr(result, f"{task}_tokens") or 0 for result in results)
        if tokens:
            loss = math.fsum(getattr(result, f"{task}_nats") or 0.0 for result in results) / tokens
            metrics |= {f"{task}_loss": loss, f"{task}_perplexity": perplexity(loss)}
            counts |= {
                f"{task}_examples": sum(getattr(result, f"{task}_tokens") is not None for result in results),
                f"{task}_tokens": tokens,
            }
    if counts.get("ae_tokens"):
        metrics["ae_accuracy"] = sum(result.ae_correct or 0 for result in results) / counts["ae_tokens"]
    answered = [result for result in results if result.prediction is not None]
    if answered:
        counts["qa_examples"] = len(answered)
        for name in ANSWER_SCORES:
            metrics[f"qa_{name}"] = 100 * fmean(getattr(result, name) for result in answered)
    scores = [result.judge for result in results if result.judge is not None]
    if scores:
        counts["qa_judged"] = len(scores)
        metrics["qa_judge"] = 100 * fmean(scores)
    metrics["tokens_read"] = fmean(result.tokens_read for result in results)
    metrics["cache_bytes"] = fmean(result.cache_bytes for result in results)
    return metrics, counts


def cells(row: Row, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    """The cells of a method in a table: its name, and its figures in some of `COLUMNS`."""
    found = [row.method]
    for name, _, form in columns:
        value = row.metrics.get(name)
        scale = 1024 if name == "cache_bytes" else 1
        found.append("-" if value is None else form.format(value / scale))
    return found


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Header and rows of cells as a Markdown table with aligned columns."""
    width = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    line = lambda row: "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)) + " |"  # noqa: E731
    rule = "|" + "|".join("-" * (w + 2) for w in width) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def _result(values: dict[str, Any]) -> ExampleResult:
    answers = values.get("answers")
    # Earlier releases saved the losses of words too.
    dropped = ("lm_word_nats", "lm_words", "lm_excluded_words")
    known = {name: value for name, value in values.items() if name not in dropped}
    return ExampleResult(**known | ({} if answers is None else {"answers": tuple(answers)}))


def finite(value: Any) -> Any:
    """A value of dictionaries and lists as JSON has it: numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
