"""Measures of answers about images: VQA's accuracy, and options by their letters."""

from __future__ import annotations

import re
from collections.abc import Sequence

_COMMA, _POINT = re.compile(r"\d,\d"), re.compile(r"\.(?!\d)")
_DIGITS = {"none": "0"} | {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
}  # fmt: skip
_VQA_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_LETTER = re.compile(r"(?:the (?:correct )?answer is:?\s*)?\(?([a-h])\s*(?:[.:,)]|$)", re.IGNORECASE)


def chosen_letter(text: str) -> str:
    """The letter of the option that an answer names, by itself, before a mark or after "the answer is"; "" for none."""
    found = _LETTER.match(text.strip())
    return "" if found is None else found.group(1).upper()


def choice_match(prediction: str, references: str | Sequence[str]) -> float:
    """1 where the prediction names the option of one of the references, such as "B" or "(B) two", else 0.

    SQuAD's exact match would take the letter A for an article, and be 1 for every empty answer. A ValueError without
    any reference.
    """
    named = [references] if isinstance(references, str) else references
    if not named:
        raise ValueError("references: expected at least one text, got none")
    return float(chosen_letter(prediction) in {*map(chosen_letter, named)} - {""})


def _vqa_words(text: str) -> str:
    """An answer as VQA's evaluation compares it: without articles, marks and apostrophes, number words as digits."""
    before = found = text.lower().replace("'", "").replace("\n", " ")
    for mark in _VQA_MARKS:
        # A mark between two words is a space; one beside a space, or in a text with a number such as 1,000, is nothing.
        beside = f"{mark} " in before or f" {mark}" in before or _COMMA.search(before) is not None
        found = found.replace(mark, "" if beside else " ")
    words = _POINT.sub("", found).split()
    return " ".join(_DIGITS.get(word, word) for word in words if word not in ("a", "an", "the"))


def vqa_accuracy(prediction: str, answers: str | Sequence[str]) -> float:
    """The accuracy of VQA, 0..1: an answer that three others gave is right, one that two gave two thirds so.

    It is the mean over the people who answered of min(1, matches among the other people / 3) (Antol et al., 2015). With
    one answer, a match is right.

    Args:
        prediction: a text.
        answers: what each person answered, ten in VQAv2; at least one.

    Raises:
        ValueError: if there is no answer.
    """
    given = [_vqa_words(answer) for answer in ([answers] if isinstance(answers, str) else answers)]
    if not given:
        raise ValueError("answers: expected at least one, got none")
    match = [answer == _vqa_words(prediction) for answer in given]
    if len(match) == 1:
        return float(match[0])
    return sum(min(1.0, (sum(match) - own) / 3) for own in match) / len(match)
