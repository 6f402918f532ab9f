"""The prompts of Dodo, Appendix D, each in two parts: the context to compress, and the text that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gistkit.evaluate.data import Example
from gistkit.evaluate.prompts import CONTEXT, INST, QUESTION, SUMMARIZE, Markers, Prompt, fill
from gistkit.formats import read_questions


def question_template(markers: Markers = INST) -> str:
    """The prompt of a question about a document, Appendix D.2, as a template for `load_questions`.

    Here and below, line breaks within the paper's sentences come from its page layout and are spaces.
    """
    return f"{markers.open}{CONTEXT}\nBased on the provided document, answer the following question:\n{QUESTION}" + (
        markers.close
    )


def question_prompt(document: str, question: str, markers: Markers = INST) -> Prompt:
    """The prompt of one question about a document, Appendix D.2."""
    return fill(question_template(markers), document, question)


def sentence_summary_prompt(document: str, markers: Markers = INST) -> Prompt:
    """The prompt of a summary in one sentence, Appendix D.3."""
    return fill(f"{markers.open}{CONTEXT}\n{SUMMARIZE}{markers.close}", document)


def word_summary_prompt(text: str, words: int, markers: Markers = INST) -> Prompt:
    """The prompt of a summary in `words` words, Appendix D.1; only the closing marker follows the text."""
    template = f"{markers.open}Please summarize the following text into {words} words: {CONTEXT}{markers.close}"
    return fill(template, text)


def iter_questions(path: str | Path, markers: Markers = INST, split: str | None = None) -> Iterator[Example]:
    """The questions of `gistkit.evaluate.iter_questions` in these prompts; of CNN/DailyMail in that of a summary."""
    for asked in read_questions(path, split):
        if asked.question is None:
            prompt = sentence_summary_prompt(asked.context, markers)
        else:
            prompt = question_prompt(asked.context, asked.question, markers)
        yield Example(prompt.context, question=prompt.question, answers=asked.answers)
