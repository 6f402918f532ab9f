"""Questions written by hand about held-out pages of the manuals: our own words, and where on its page an answer is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from texts import held_out_pages

from gistkit.evaluate import Example
from gistkit.evaluate.data import QUESTION

FILE = Path(__file__).with_name("manual_questions.jsonl")


class Question(NamedTuple):
    """A line of the file.

    Args:
        page: "package/name" of a page, without the number that its file has.
        question, answer: the answer as the page has it.
        at: the character of the page where the answer is; in another version of the package the nearest one counts.
    """

    page: str
    question: str
    answer: str
    at: int


def read(path: Path = FILE) -> list[Question]:
    """All questions."""
    return [Question(**json.loads(line)) for line in path.read_text().splitlines()]


def examples(tokenizer: Any, length: int, path: Path = FILE) -> list[Example]:
    """The questions as examples, each about up to `length` tokens of its page with the answer in their middle.

    Those whose page is not held out, or has no such answer, are left out: other versions of the packages differ.
    """
    pages: dict[str, list[Path]] = {}
    for page in held_out_pages():
        pages.setdefault(f"{page.parent.name}/{page.stem.partition('-')[2]}", []).append(page)
    found = []
    for one in read(path):
        for page in pages.get(one.page, [])[:1]:
            text = page.read_text()
            if (at := nearest(text, one.answer, one.at)) is None:
                continue
            before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[:at], text[at:]))
            first = max(0, len(before) - length // 2)
            context = [*before[first:], *after][:length]
            question = tokenizer(QUESTION.format(question=one.question), add_special_tokens=False)["input_ids"]
            found.append(Example(context, question=question, answers=[one.answer]))
    return found


def nearest(text: str, answer: str, at: int) -> int | None:
    """Where in `text` the answer is, as near to `at` as there is one; None if there is none."""
    places = [index for index in range(len(text)) if text.startswith(answer, index)]
    return min(places, key=lambda index: abs(index - at), default=None)
