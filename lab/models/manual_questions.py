"""Questions written by hand about pages of the manuals: our own words, and where on its page an answer is.

example: python lab/models/manual_questions.py runs/models/manual.jsonl     # for gistkit evaluate --questions
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from texts import held_out_pages, training_pages

from gistkit.evaluate import Example
from gistkit.evaluate.data import QUESTION
from gistkit.hf.smollm2 import load_smollm2_tokenizer

FILE = Path(__file__).with_name("manual_questions.jsonl")
# Tokens of the part of a page that a question is about.
PAGE = 512


class Question(NamedTuple):
    """A line of the file."""

    # "package/name", without the number that its file has.
    page: str
    question: str
    # As the page has it, at this character; in another version of the package the nearest place counts.
    answer: str
    at: int


def read(path: Path = FILE) -> list[Question]:
    """All questions."""
    return [Question(**json.loads(line)) for line in path.read_text().splitlines()]


class Together(NamedTuple):
    """Questions about the same token ids."""

    context: list[int]
    asked: list[Question]


def together(tokenizer: Any, length: int, path: Path) -> list[Together]:
    """Questions about pages that are not held out, those of a page about up to `length` tokens of it together."""
    questions: dict[str, list[Question]] = {}
    for one in read(path):
        questions.setdefault(one.page, []).append(one)
    return _about(tokenizer, length, questions.values(), training_pages())


def about(tokenizer: Any, length: int, path: Path = FILE) -> list[Together]:
    """The questions about held-out pages, each about up to `length` tokens with the answer in their middle."""
    return _about(tokenizer, length, ([one] for one in read(path)), held_out_pages())


def _about(tokenizer: Any, length: int, groups: Iterable[list[Question]], files: Iterable[Path]) -> list[Together]:
    """Questions about a page each, and the tokens around the middle of their answers.

    What has no answer there, or no page, is left out: other versions of the packages differ.
    """
    pages, found = by_name(files), []
    for asked in groups:
        for page in pages.get(asked[0].page, [])[:1]:
            text = page.read_text()
            places = [at for one in asked if (at := nearest(text, one.answer, one.at)) is not None]
            if not places:
                continue
            context = around(tokenizer, text, (min(places) + max(places)) // 2, length)
            words = tokenizer.decode(context)
            found.append(Together(context, [one for one in asked if one.answer in words]))
    return [one for one in found if one.asked]


def by_name(pages: Iterable[Path]) -> dict[str, list[Path]]:
    """Pages by `Question.page`."""
    found: dict[str, list[Path]] = {}
    for page in pages:
        found.setdefault(f"{page.parent.name}/{page.stem.partition('-')[2]}", []).append(page)
    return found


def around(tokenizer: Any, text: str, at: int, length: int) -> list[int]:
    """Up to `length` token ids of a text, half of them before the character `at` if there are as many."""
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[:at], text[at:]))
    return [*before[max(0, len(before) - length // 2) :], *after][:length]


def examples(tokenizer: Any, length: int, path: Path = FILE) -> list[Example]:
    """The questions as examples; arguments as in `about`."""
    ids = lambda question: tokenizer(QUESTION.format(question=question), add_special_tokens=False)["input_ids"]  # noqa: E731
    return [
        Example(context, question=ids(one.question), answers=[one.answer])
        for context, (one,) in about(tokenizer, length, path)
    ]


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes questions with their contexts as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    print(f"{len(lines)} questions: {path}")


def nearest(text: str, answer: str, at: int) -> int | None:
    """Where in `text` the answer is, as near to `at` as there is one; None if there is none."""
    places = [index for index in range(len(text)) if text.startswith(answer, index)]
    return min(places, key=lambda index: abs(index - at), default=None)


def main() -> int:
    """Writes the questions with their contexts as JSON lines."""
    out, tokenizer = Path(sys.argv[1]), load_smollm2_tokenizer()
    lines = [
        {"context": tokenizer.decode(context), "question": one.question, "answers": [one.answer]}
        for context, (one,) in about(tokenizer, PAGE)
    ]
    write(out, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
