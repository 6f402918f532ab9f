"""Facts put into passages of a text, and questions about them: dates, numbers, names, yes or no, and what is not there.

The sentences are ours and made up, so that nothing but the passage has the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, NamedTuple

from gistkit.common.text_ids import text_ids
from gistkit.evaluate.data import QUESTION, Example
from gistkit.evaluate.prompts import fill

KINDS = ("dates", "numbers", "names", "yes or no", "not in the text")
ABSENT = ("not in the text", "not mentioned", "not given")
# So many contexts of a length, in tokens.
LENGTHS = {64: 8, 128: 8, 256: 8, 512: 6, 1024: 4, 2048: 3, 4096: 2}
_THINGS = (
    "boat house", "bakery", "clock tower", "observatory", "ferry", "orchard", "stone bridge", "museum", "quarry",
    "lighthouse", "post office", "windmill", "chapel", "swimming pool", "tram depot", "pump station", "theater",
    "bookshop", "vineyard", "fire station", "city archive", "bicycle shed", "print shop", "weather mast", "dairy",
    "glass workshop", "night school", "town hall", "ice rink", "saw mill", "cable car", "botanical garden",
)  # fmt: skip
_FIRST = (
    "Agnes", "Bruno", "Celia", "Dario", "Edith", "Frida", "Goran", "Hanna", "Igor", "Judit", "Klaus", "Livia", "Milan",
    "Noemi", "Otto", "Pilar", "Ralf", "Selma", "Timo", "Ulla",
)  # fmt: skip
_LAST = (
    "Arnold", "Barros", "Cohen", "Duarte", "Ekman", "Farkas", "Gruber", "Haas", "Iversen", "Jonsson", "Kral",
    "Lindgren", "Molnar", "Novak", "Ortega", "Pavlov", "Riva", "Santos", "Toth", "Vidal",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")


class Fact(NamedTuple):
    """A sentence, what is asked about it, and the answer."""

    sentence: str
    question: str
    answer: str


def draw_fact(kind: str, thing: str, draw: random.Random) -> Fact:
    """A fact of one of the first four `KINDS` about a thing."""
    date = f"{draw.randint(1, 28)} {draw.choice(MONTHS)} {draw.randint(1951, 2019)}"
    person, count = f"{draw.choice(_FIRST)} {draw.choice(_LAST)}", str(draw.randint(12, 980))
    is_so = draw.random() < 0.5
    answer = "yes" if is_so else "no"
    forms = {
        "dates": [
            Fact(f"The {thing} was last inspected on {date}.", f"When was the {thing} last inspected?", date),
            Fact(f"The {thing} first opened on {date}.", f"On which day did the {thing} first open?", date),
        ],
        "numbers": [
            Fact(f"The {thing} had {count} visitors last week.", f"How many visitors had the {thing} last week?",
                 count),
            Fact(f"The {thing} is insured for {count} dollars.", f"For how many dollars is the {thing} insured?",
                 count),
        ],
        "names": [
            Fact(f"{person} looks after the {thing}.", f"Who looks after the {thing}?", person),
            Fact(f"The plans of the {thing} were drawn by {person}.", f"Who drew the plans of the {thing}?", person),
        ],
        "yes or no": [
            Fact(f"The {thing} is {'open' if is_so else 'closed'} on Sundays.", f"Is the {thing} open on Sundays?",
                 answer),
            Fact(f"The {thing} {'has' if is_so else 'lacks'} a cellar.", f"Does the {thing} have a cellar?", answer),
        ],
    }  # fmt: skip
    return draw.choice(forms[kind])


def count_of(length: int) -> int:
    """Facts in a passage of so many tokens."""
    return max(1, round(2 * log2(length / 32)))


def fact_questions(
    tokens: Sequence[int],
    tokenizer: Any,
    lengths: Mapping[int, int] = LENGTHS,
    *,
    continuation: int = 64,
) -> dict[str, list[Example]]:
    """Questions by kind about passages of a text; the questions of a passage have the same context.

    A passage has `count_of` facts, each about another thing and after a sentence of the text, and a question about
    each. Every passage of 128 tokens and more also has a question that it does not answer. The same arguments give
    the same questions. The first question of a passage has the text's next tokens as its continuation.

    Args:
        tokens: ids [n] of a text.
        tokenizer: of transformers.
        lengths: how many passages of each length in tokens, the facts among them; fewer where the text ends.
        continuation: tokens of a continuation.

    Raises:
        ValueError: if the text is shorter than one passage.
    """
    draw, at = random.Random(0), 0
    # As far apart as the text allows.
    spare = len(tokens) - sum((length + continuation) * passages for length, passages in lengths.items())
    gap = max(spare // max(sum(lengths.values()), 1), 0)
    found: dict[str, list[Example]] = {kind: [] for kind in KINDS}
    for length, passages in lengths.items():
        for index in range(passages):
            things = draw.sample(_THINGS, count_of(length) + 1)
            facts = []
            for place, thing in enumerate(things):
                kind = KINDS[(index + place) % 4]
                facts.append((kind, draw_fact(kind, thing, draw)))
            (_, other) = facts.pop()
            own = sum(len(text_ids(f" {fact.sentence}", tokenizer, special_tokens=False)) for _, fact in facts)
            room = max(length - own, 8)
            if at + room + continuation > len(tokens):
                break
            passage, after = tokens[at : at + room], list(tokens[at + room : at + room + continuation])
            at += room + continuation + gap
            context = plant(tokenizer.decode(list(passage)), [fact.sentence for _, fact in facts], draw)
            asked: list[tuple[str, str, tuple[str, ...]]]
            asked = [(kind, fact.question, (fact.answer,)) for kind, fact in facts]
            if length >= 128:
                asked.append((KINDS[-1], other.question, ABSENT))
            for place, (kind, question, answers) in enumerate(asked):
                prompt = fill(QUESTION, context, question)
                found[kind].append(Example(prompt.context, None if place else after, prompt.question, answers))
    if not any(found.values()):
        raise ValueError(f"tokens: expected a text of at least one passage with its continuation, got {len(tokens)}")
    return {kind: examples for kind, examples in found.items() if examples}


def plant(passage: str, sentences: Sequence[str], draw: random.Random) -> str:
    """A passage with sentences in it, each behind one of its own sentences, as far apart as there are such places."""
    parts = _SENTENCE_END.split(passage)
    places = sorted(range(1, len(parts) + 1), key=lambda _: draw.random())
    behind: dict[int, list[str]] = {}
    for index, sentence in enumerate(sentences):
        behind.setdefault(places[index % len(places)], []).append(f" {sentence}")
    return "".join(part + "".join(behind.get(index, [])) for index, part in enumerate(parts, 1))
