"""Questions about images with options, as ScienceQA and MMBench are published: the answer is an option's letter."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from gistkit.formats import files
from gistkit.train.conversations import IMAGE, Conversation, image_file, is_choices, load_conversations

LETTERS = "ABCDEFGH"
# What LLaVA is trained to follow.
ASKED = "Answer with the option's letter from the given choices directly."
# MMBench numbers a question that it asks again with its options in another order by this much more.
_ROUND = 1_000_000


class Choice(NamedTuple):
    """A question with its options below it."""

    where: str
    # A file's name, or what is in one.
    image: str | bytes
    question: str
    # The letter of the right option.
    answer: str
    # The name of the questions that are one with their options in different orders.
    group: str


def choices(path: Path) -> Iterator[Choice]:
    """The test questions of a file that have an image.

    - ScienceQA: problems.json. Images are test/ID/image.png.
    - MMBench: a .tsv file with the images in it. Its circular evaluation asks a question as often as it has options,
      each time with these moved on by one; where no question is there in several orders, they are made here.
    """
    return _mmbench(path) if files.suffix_of(path) == ".tsv" else _scienceqa(path)


def image_conversations(path: Path, images: Path, extracted: Path) -> list[Conversation]:
    """The test questions of a file in one of these forms, or what `gistkit.train.load_conversations` reads.

    Images that are in the file are written into the folder `extracted`.
    """
    if not path.is_file() or not images.is_dir() or not is_choices(path):
        return load_conversations(path, images)
    found = []
    for choice in choices(path):
        if isinstance(choice.image, bytes):
            file = extracted / sha256(choice.image).hexdigest()
            file.write_bytes(choice.image)
        else:
            file = image_file(choice.where, choice.image, images)
        # What stands for an image is no text.
        turn = choice.question.replace(IMAGE, ""), choice.answer
        found.append(Conversation((file,), (turn,), group=choice.group))
    if not found:
        raise ValueError(f"{path}: expected at least one question with an image, got none")
    return found


def first(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """The first so many questions, each with all orders of its options, of which it is right only if all are."""
    found: list[Conversation] = []
    groups: set[str] = set()
    for each in conversations:
        if each.group in groups:
            found.append(each)
        elif count:
            turns = each.turns[:count]
            # Other right answers are to the last question.
            found.append(each if turns == each.turns else replace(each, turns=turns, others=()))
            count -= len(turns)
            groups |= {each.group} - {""}
    return found


def _scienceqa(path: Path) -> Iterator[Choice]:
    for name, problem in files.members(path):
        where = f"{path}, {name!r}"
        if not isinstance(problem, Mapping):
            raise ValueError(f"{where}: expected a JSON object, got {type(problem).__name__}")
        image, options, answer = (problem.get(field) for field in ("image", "choices", "answer"))
        if problem.get("split") != "test" or not image:
            continue
        if not isinstance(options, list) or not all(isinstance(each, str) for each in options):
            raise ValueError(f"{where}, 'choices': expected a list of texts, got {options!r:.60}")
        if not isinstance(answer, int) or not 0 <= answer < len(options):
            raise ValueError(f"{where}, 'answer': expected an index of {len(options)} choices, got {answer!r:.60}")
        text = _asked(where, problem.get("hint"), problem.get("question"), options)
        yield Choice(where, f"test/{name}/{image}", text, LETTERS[answer], str(name))


def _mmbench(path: Path) -> Iterator[Choice]:
    # Circular files may name another row's image in place of their own.
    images: dict[str, str] = {}
    rounds: Counter[int] = Counter()
    for where, row in files.rows(path, "\t"):
        images[_cell(where, row, "index")] = _cell(where, row, "image")
        rounds[_number(where, row) % _ROUND] += 1
    circular = any(count > 1 for count in rounds.values())
    for where, row in files.rows(path, "\t"):
        letters = [letter for letter in LETTERS if row.get(letter, "").strip()]
        options = [row[letter] for letter in letters]
        if (right := _cell(where, row, "answer").strip()) not in letters:
            raise ValueError(f"{where}, 'answer': expected the letter of an option, got {row['answer']!r:.60}")
        answer = letters.index(right)
        image = _decoded(where, images.get(row["image"], row["image"]))
        for moved in range(1 if circular else len(options)):
            text = _asked(where, row.get("hint"), row.get("question"), options[moved:] + options[:moved])
            letter = LETTERS[(answer - moved) % len(options)]
            yield Choice(where, image, text, letter, str(_number(where, row) % _ROUND))


def _asked(where: str, hint: object, question: object, options: list[str]) -> str:
    """What is read of a question: its hint before it, its options below."""
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}, 'question': expected a text, got {question!r:.60}")
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"{where}: expected 2 to {len(LETTERS)} options, got {len(options)}")
    before = [hint] if isinstance(hint, str) and hint.strip() else []
    listed = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([*before, question, *listed, ASKED])


def _cell(where: str, row: Mapping[str, Any], column: str) -> str:
    text = row.get(column)
    if not text:
        raise ValueError(f"{where}, {column!r}: expected a text, got {text!r}")
    return str(text)


def _number(where: str, row: Mapping[str, Any]) -> int:
    text = _cell(where, row, "index")
    if not text.isdecimal():
        raise ValueError(f"{where}, 'index': expected a whole number, got {text!r:.60}")
    return int(text)


def _decoded(where: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}, 'image': expected an image in base64, got {text!r:.60}") from error
