"""Judges of pairs: which of two systems' answers to the same questions is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

from gistkit.evaluate.prompts import SUMMARIZE
from gistkit.evaluate.report import Report, Row
from gistkit.formats.questions import Asked
from gistkit_lab.evaluate.endpoint import JudgeError, PromptedJudge, in_order
from gistkit_lab.evaluate.judge import described, score_of

# (question, first answer, second answer) -> 1 where the first is better, 0 where the second is, 0.5 for neither.
PairJudge = Callable[..., float]

# The compression loss's paper has ICAE's prompt, which it does not print; these words are gistkit's own.
TEMPLATE = """\
You compare two answers to the same instruction about a text.

Text:
{context}

Instruction:
{question}

Answer A:
{first}

Answer B:
{second}

An answer is better if it does what the instruction asks for, and if what it says is right by the text; neither length \
nor the order in which the answers stand counts. Reply with a JSON object alone: {"better": "A"}, {"better": "B"}, or \
{"better": "neither"} if they are as good as each other."""
# Classes of methods that no set was trained for.
UNTRAINED = ("FullContext", "NoContextBaseline", "SummaryContext")
_SCORES = {"a": 1.0, "b": 0.0, "neither": 0.5}


class Pair(NamedTuple):
    """What a judge of pairs is asked about: texts."""

    question: str
    first: str
    second: str
    context: str = ""


class OpenAIPairJudge(PromptedJudge):
    """A model behind an OpenAI-compatible endpoint that says which of two answers is better.

    A reply counts if it holds a JSON object with a "better" of "A", "B" or "neither"; the last such object is taken.
    The arguments are those of `PromptedJudge`, with a template of {question}, {first}, {second} and perhaps {context}.
    """

    default, fields = TEMPLATE, ("question", "first", "second")
    trial = "What is one and one?", "2", "3"
    wanted, form = "a verdict", '{"better": "A", "B" or "neither"}'

    def read(self, found: Mapping[str, Any]) -> float | None:
        """1 where the first answer is better, 0 where the second is, 0.5 for neither."""
        better = found.get("better")
        return _SCORES.get(better.strip().lower()) if isinstance(better, str) else None


def compared(
    judge: PairJudge, pairs: Sequence[Pair], *, both_orders: bool = True, on_pair: Callable[[], Any] = lambda: None
) -> list[float | None]:
    """For each pair 1 where the first answer wins, 0 where it loses, 0.5 for a tie; None where the judge gave none.

    In both orders each pair is asked about twice, the second time with the answers exchanged, so that a liking for the
    first or the last place cancels: who is better in both, or in one and as good in the other, wins.

    Args:
        judge: called as judge(question, first, second); it raises a `JudgeError` where it has no verdict. Attributes
            `reads_context` and `concurrency` as in `judged`.
        pairs: the texts.
        both_orders: False: one question a pair, the first answer first.
        on_pair: called in this thread after each pair, in their order.

    Raises:
        ValueError: if a verdict is no number from 0 to 1. What else a judge raises ends the comparison.
    """
    return in_order(judge, partial(_compare, judge, both_orders), pairs, on_pair)


def compare_answers(
    first: Report,
    second: Report,
    questions: Iterable[Asked],
    judge: PairJudge,
    *,
    both_orders: bool = True,
    on_pair: Callable[[], Any] = lambda: None,
) -> Report:
    """How often the answers of one report win over those of another: More Effective LLM Compressed Tokens, Table 3.

    The report has one row, with the metrics "win", "lose" and "tie" in percent of all answers, and the counts "pairs"
    and "judged". As in the paper the three add up to less than 100 where the judge gave no verdict.

    Args:
        first, second: reports with their examples, of the same questions and one method beside the baselines each.
        questions: as `gistkit.formats.read_questions` gives them, at least as many as were answered.
        judge, both_orders, on_pair: as in `compared`.

    Raises:
        ValueError: if a report has no answers, or they are to other questions.
    """
    started = perf_counter()
    rows = [_only_row(name, report) for name, report in (("first", first), ("second", second))]
    pairs = []
    numbers = [len(row.examples) for row in rows]
    if not numbers[0] or numbers[0] != numbers[1]:
        raise ValueError(f"first, second: expected reports of the same examples, kept in them, got {numbers} examples")
    for index, asked in enumerate(islice(questions, numbers[0])):
        outputs = []
        for name, row in zip(("first", "second"), rows, strict=True):
            result = row.examples[index]
            if result.output is None or result.answers != asked.answers:
                got = "no answer" if result.output is None else f"an answer to a question with {result.answers}"
                raise ValueError(f"{name}: expected an answer to {asked.where}, {asked.answers}, got {got}")
            outputs.append(result.output)
        question = SUMMARIZE if asked.question is None else asked.question
        pairs.append(Pair(question, outputs[0], outputs[1], asked.context))
    if len(pairs) < numbers[0]:
        raise ValueError(f"questions: expected the {numbers[0]} that were answered, got {len(pairs)}")
    verdicts = compared(judge, pairs, both_orders=both_orders, on_pair=on_pair)
    metrics = {
        name: 100 * verdicts.count(value) / len(pairs) for name, value in (("win", 1.0), ("lose", 0.0), ("tie", 0.5))
    }
    counts = {"pairs": len(pairs), "judged": sum(verdict is not None for verdict in verdicts)}
    settings = {"judge": described(judge), "both_orders": both_orders}
    name = f"{rows[0].method} against {rows[1].method}"
    return Report((Row(name, metrics, counts, perf_counter() - started),), settings)


def _only_row(name: str, report: Report) -> Row:
    """The row of the only method that is no baseline, in a report that messages call `name`."""
    described = report.settings.get("methods", {})
    trained = [row for row in report.rows if described.get(row.method, {}).get("class") not in UNTRAINED]
    if len(trained) != 1:
        raise ValueError(
            f"{name}: expected one method beside the baselines, got "
            f"{', '.join(row.method for row in trained) or 'none'}"
        )
    return trained[0]


def _compare(judge: PairJudge, both_orders: bool, pair: Pair) -> float | None:
    ask = partial(score_of, judge, pair.question, context=pair.context)
    try:
        score = ask(pair.first, pair.second)
        if both_orders:
            score += 1 - ask(pair.second, pair.first) - 0.5
    except JudgeError:
        return None
    return 0.5 if score == 0.5 else float(score > 0.5)
