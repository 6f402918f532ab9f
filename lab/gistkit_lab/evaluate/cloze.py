"""Questions about the wording of any text: which word follows a phrase."""

from __future__ import annotations

import random
import re

from gistkit.evaluate import QUESTION, Example, normalise_answer
from gistkit.evaluate.prompts import check_template, fill


def cloze_questions(
    text: str, *, words: int = 100, phrase: int = 4, seed: int = 0, template: str = QUESTION
) -> list[Example]:
    """One question for each passage of plain text: which word follows a phrase that occurs in it once.

    The questions test the wording of the passage, not its meaning. The same arguments give the same questions.

    Args:
        text: plain text.
        words: words of a passage.
        phrase: words of the phrase, fewer than `words`.
        seed: selects the phrase in each passage.
        template: as in `load_questions`.

    Raises:
        ValueError: if no passage has a suitable word.
    """
    check_template(template)
    if not 1 <= phrase < words:
        raise ValueError(f"phrase: expected 1 to {words - 1} words of a passage of {words}, got {phrase}")
    draw = random.Random(seed)
    pieces = re.findall(r"\S+", text)
    examples = []
    for start in range(0, len(pieces) - words + 1, words):
        passage = pieces[start : start + words]
        phrases = [tuple(passage[i : i + phrase]) for i in range(words - phrase + 1)]
        # A word of three letters or more survives the removal of punctuation and articles.
        spots = [
            spot
            for spot in range(words - phrase)
            if phrases.count(phrases[spot]) == 1 and len(normalise_answer(passage[spot + phrase])) >= 3
        ]
        if spots:
            spot = draw.choice(spots)
            question = f'Which word follows "{" ".join(phrases[spot])}"?'
            answer = passage[spot + phrase].strip("\"'.,;:!?()[]{}")
            prompt = fill(template, " ".join(passage), question)
            examples.append(Example(prompt.context, question=prompt.question, answers=(answer,)))
    if not examples:
        raise ValueError(f"text: expected a passage of {words} words with a word to ask for, got {len(pieces)} words")
    return examples
