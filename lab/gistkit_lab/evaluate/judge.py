"""Judges of answers: any Python function of a question, a reference and an answer, or a model behind an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gistkit.evaluate import Example, Report, Row
from gistkit.evaluate.data import prepare, words_of
from gistkit.evaluate.metrics import need
from gistkit.evaluate.report import summary
from gistkit_lab.evaluate.endpoint import JudgeError, PromptedJudge, in_order

# (question, reference, answer) -> a score from 0, wrong, to 1, right. See `judged` for what else one may have.
Judge = Callable[..., float]

# GistPool's Appendix C describes its prompt, a judge with the full context and the right response, without printing it
# in the stored text; these words are gistkit's own.
TEMPLATE = """\
You grade an answer to a question about a document.

Document:
{context}

Question:
{question}

Reference answer:
{reference}

Answer to grade:
{answer}

The answer is correct if it says what the reference answer says, in whatever words, and nothing that the document \
contradicts. Reply with a JSON object alone: {"score": 1} if it is correct, {"score": 0} if it is not."""


class Answered(NamedTuple):
    """What a judge is asked about: texts, with all right answers."""

    question: str
    references: Sequence[str]
    answer: str = ""
    context: str = ""


class OpenAIJudge(PromptedJudge):
    """A model behind an OpenAI-compatible endpoint that grades answers; a call gives a score from 0 to 1.

    A reply counts if it holds a JSON object with a "score" from 0 to 1; the last such object is taken. One without is
    tried again, as GistPool's Appendix C does three times. The arguments are those of `PromptedJudge`, with a template
    of {question}, {reference}, {answer} and, as in GistPool, {context}.
    """

    default, fields = TEMPLATE, ("question", "reference", "answer")
    trial = "What is one and one?", "2", "2"
    wanted, form = "a score", '{"score": a number from 0 to 1}'

    def read(self, found: Mapping[str, Any]) -> float | None:
        """The score, if it is a number from 0 to 1."""
        score = found.get("score")
        return float(score) if isinstance(score, int | float) and 0 <= score <= 1 else None


def judged(
    judge: Judge, answers: Sequence[Answered], *, on_answer: Callable[[], Any] = lambda: None
) -> list[float | None]:
    """The scores of answers, from 0 to 1; None where the judge raised a `JudgeError`.

    An answer with several references has the best score over them; after a 1 the others are not asked for.

    Args:
        judge: called as judge(question, reference, answer). An attribute `reads_context` that is true adds the keyword
            `context`, the whole document; an attribute `concurrency` is how many threads may call it at a time.
        answers: the texts.
        on_answer: called in this thread after each answer, in their order.

    Raises:
        ValueError: if a score is no number from 0 to 1. What else a judge raises ends the evaluation.
    """
    return in_order(judge, partial(_best, judge), answers, on_answer)


def questions_of(data: Sequence[Example], tokenizer: Any | None) -> list[Answered | None]:
    """What a judge is asked about each example, but for the answer; None for one without a question.

    Raises:
        ValueError: as of `gistkit.evaluate.compare` for the task "qa".
    """
    return [
        Answered(words_of(row.question, tokenizer).strip(), row.answers, context=words_of(row.context, tokenizer))
        if row.has("qa")
        else None
        for row in prepare(data, tokenizer, ("qa",))
    ]


def judge_report(report: Report, asked: Sequence[Answered | None], judge: Judge, *, progress: bool = True) -> Report:
    """A report with a judge's scores of the answers in it: the metric "qa_judge", 0..100, of the "qa_judged" that it
    gave. The share of wrong answers, as in GistPool, is 100 less it.

    Args:
        report: with its examples.
        asked: for each example, as `questions_of` gives them.
        judge: as in `judged`.
        progress: whether to show progress bars.
    """
    return replace(
        report,
        rows=tuple(_judged_row(row, asked, judge, progress) for row in report.rows),
        settings=report.settings | {"judge": described(judge)},
    )


def _judged_row(row: Row, asked: Sequence[Answered | None], judge: Judge, progress: bool) -> Row:
    if len(row.examples) != len(asked):
        raise ValueError(f"report: expected results of {len(asked)} examples, got {len(row.examples)} of {row.method}")
    answers = {
        index: each._replace(answer=row.examples[index].prediction or "")
        for index, each in enumerate(asked)
        if each is not None
    }
    with need("tqdm").tqdm(
        total=len(answers), desc=f"{row.method}, judged", unit="answer", disable=not progress
    ) as bar:
        scores = dict(zip(answers, judged(judge, [*answers.values()], on_answer=bar.update), strict=True))
    examples = tuple(replace(each, judge=scores.get(index)) for index, each in enumerate(row.examples))
    metrics, counts = summary(examples)
    # An earlier judge's are not its own.
    metrics |= {name: value for name, value in row.metrics.items() if name != "qa_judge"}
    counts |= {name: value for name, value in row.counts.items() if name != "qa_judged"}
    return replace(row, metrics=metrics, counts=counts, examples=examples)


def _best(judge: Judge, answered: Answered) -> float | None:
    best = None
    for reference in dict.fromkeys(answered.references):
        try:
            score = score_of(judge, answered.question, reference, answered.answer, context=answered.context)
        except JudgeError:
            continue
        best = max(best or 0.0, score)
        if best == 1:
            break
    return best


def score_of(judge: Callable[..., float], *texts: str, context: str) -> float:
    """What a judge says of texts, from 0 to 1, with the whole document if it reads that."""
    more = {"context": context} if getattr(judge, "reads_context", False) else {}
    score = judge(*texts, **more)
    if not isinstance(score, int | float) or not 0 <= score <= 1:
        raise ValueError(f"judge: expected a score from 0 to 1, got {score!r}")
    return float(score)


def described(judge: Callable[..., float]) -> Any:
    """What a report says of a judge: its description, or the name of the function."""
    return getattr(judge, "description", None) or getattr(judge, "__name__", type(judge).__name__)
