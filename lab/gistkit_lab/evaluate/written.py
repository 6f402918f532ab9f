"""Contexts that a model has shortened in words, and what it answers from them: GistPool's Gemini Compress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from gistkit.evaluate import metrics as scores
from gistkit.evaluate.data import Example, prepare, words_of
from gistkit.evaluate.report import ANSWER_SCORES, ExampleResult, Report, Row, summary
from gistkit.evaluate.runner import answer_bleu
from gistkit_lab.evaluate.endpoint import Endpoint, EndpointError, check_fields, filled, in_order
from gistkit_lab.evaluate.judge import Answered, Judge, described, judged

# GistPool's Appendix D has two prompts, which are not in its stored text; these words are gistkit's own.
SHORTEN = """\
Shorten the text below to at most {words} words. Keep every fact that a question about the text could ask for: names, \
numbers, dates, places, who did what and why. Leave out words before facts; notes and fragments are fine. Reply with \
the shortened text alone.

Text:
{context}"""
ANSWER = """\
{context}

Answer from the text above, which is a shortened one, as briefly as it allows, and reply with the answer alone. If it \
does not say, guess.
{question}"""


class WriterError(EndpointError):
    """A writer that wrote nothing."""


class OpenAIWriter(Endpoint):
    """A model behind an OpenAI-compatible endpoint that shortens texts, and answers from what it wrote.

    Args:
        url, model, endpoint: as in `Endpoint`.
        template: the prompt of shortening, a user's message, with {words} and {context}.
        answer_template: that of an answer, with {context} and {question}.

    Raises:
        ValueError: if an argument is out of range.
    """

    role, error = "writer", WriterError

    def __init__(
        self, url: str, model: str, *, template: str = SHORTEN, answer_template: str = ANSWER, **endpoint: Any
    ) -> None:
        super().__init__(url, model, **endpoint)
        check_fields(template, ("words", "context"))
        check_fields(answer_template, ("context", "question"))
        self.template, self.answer_template = template, answer_template

    @property
    def description(self) -> dict[str, Any]:
        """What a report says of the writer; never the key."""
        return super().description | {"template": self.template, "answer_template": self.answer_template}

    def check(self) -> None:
        """Has one text shortened, so that a wrong address, name or key shows before the others.

        Raises:
            WriterError: if none came.
        """
        self.shorten("One and one are two.", 3)

    def shorten(self, context: str, words: int) -> str:
        """The context in about so many words.

        Raises:
            WriterError: if no attempt gave any.
        """
        prompt = filled(self.template, {"context": context, "words": str(words)})
        return self.ask(prompt, "a shortened text", _text)

    def answer(self, context: str, question: str) -> str:
        """The answer to a question about a shortened text.

        Raises:
            WriterError: if no attempt gave one.
        """
        return self.ask(filled(self.answer_template, {"context": context, "question": question}), "an answer", _text)


def evaluate_written(
    writer: OpenAIWriter,
    data: Sequence[Example],
    *,
    ratio: float,
    tokenizer: Any,
    cut: bool = False,
    judge: Judge | None = None,
    on_answer: Callable[[], Any] = lambda: None,
) -> Report:
    """What a writer answers from contexts that it has shortened: Gemini Compress (GistPool, Section 2, Table 12).

    The report has one row, with the scores of answers, the mean tokens that stand for a context ("tokens read"), and
    the ratio that was reached ("written_ratio"): all tokens of the contexts over all of what was written (Figure 5).
    There is no loss, since the writer gives none. Where it gave no text, the answer is empty and counts as wrong.

    Args:
        writer: shortens contexts and answers; an object with `shorten`, `answer` and `description`.
        data: examples with questions; contexts that are equal are shortened once.
        ratio: words of a context for each word that is asked for, at least 1; tokens too, with `cut`.
        tokenizer: of the model that the row is to be beside; it counts, and cuts.
        cut: what is longer than ceil(n / ratio) tokens, for a context of n, is cut to as many, so that a compressor at
            that ratio has no fewer.
        judge: as in `compare`.
        on_answer: called after each answer, in their order.

    Raises:
        ValueError: if the ratio is out of range, or as in `compare` for the task "qa".
    """
    if not 1 <= ratio < math.inf:
        raise ValueError(f"ratio: expected a number of at least 1, got {ratio}")
    if tokenizer is None:
        raise ValueError("tokenizer: expected one that counts what was written, got None")
    started = perf_counter()
    kept = [(row, each) for row, each in zip(prepare(data, tokenizer, ("qa",)), data, strict=True) if row.has("qa")]
    rows = [row for row, _ in kept]
    contexts, questions = (
        # Texts as they are: their tokens may not give every character back.
        [each if isinstance(each, str) else words_of(ids, tokenizer) for each, ids in texts]
        for texts in ([(x.context, row.context) for row, x in kept], [(x.question, row.question) for row, x in kept])
    )
    unlike = list(dict.fromkeys(contexts))
    shorten = partial(_shorten, writer, tokenizer, ratio, cut)
    written = dict(zip(unlike, in_order(writer, shorten, unlike), strict=True))
    asked = [(written[context], question.strip()) for context, question in zip(contexts, questions, strict=True)]
    results, whole = [], 0
    outputs = in_order(writer, partial(_answer, writer), asked, on_answer)
    for row, (text, _), output in zip(rows, asked, outputs, strict=True):
        prediction = output.splitlines()[0].strip() if output else ""
        result = ExampleResult(len(_ids(tokenizer, text)), 0.0, output=output, prediction=prediction)
        result.answers = row.answers
        for name in ANSWER_SCORES:
            said = output if name == "contains_answer" else prediction
            setattr(result, name, getattr(scores, name)(said, row.answers))
        whole += len(row.context)
        results.append(result)
    if judge is not None:
        answers = [
            Answered(question, row.answers, result.prediction or "", context)
            for row, (_, question), result, context in zip(rows, asked, results, contexts, strict=True)
        ]
        for result, score in zip(results, judged(judge, answers), strict=True):
            result.judge = score
    measured, counts = summary(results)
    # It has no cache of the model.
    del measured["cache_bytes"]
    measured["qa_bleu4"] = answer_bleu(results, tokenizer)
    if measured["tokens_read"]:
        measured["written_ratio"] = whole / sum(result.tokens_read for result in results)
    counts["unwritten"] = sum(not text for text in written.values())
    settings = {"tasks": ["qa"], "ratio": ratio, "cut": cut, "writer": writer.description}
    if judge is not None:
        settings["judge"] = described(judge)
    row_of_all = Row(f"Written {ratio:g}x", measured, counts, perf_counter() - started, tuple(results))
    return Report((row_of_all,), settings)


def _shorten(writer: OpenAIWriter, tokenizer: Any, ratio: float, cut: bool, context: str) -> str:
    try:
        text = writer.shorten(context, math.ceil(len(context.split()) / ratio))
    except WriterError:
        return ""
    most = math.ceil(len(_ids(tokenizer, context)) / ratio)
    ids = _ids(tokenizer, text)
    return words_of(ids[:most], tokenizer) if cut and len(ids) > most else text


def _answer(writer: OpenAIWriter, asked: tuple[str, str]) -> str:
    text, question = asked
    try:
        return writer.answer(text, question).strip() if text else ""
    except WriterError:
        return ""


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _text(reply: str) -> str:
    if not (text := reply.strip()):
        raise ValueError("an empty reply")
    return text
