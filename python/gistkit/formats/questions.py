"""Questions in the formats that data sets are published in, chosen by what a file holds, one question at a time.

A record is one of

- this package's own, or SQuAD's of the Hugging Face hub: {"context", "question", "answers": [...] or {"text": [...]}};
- MRQA: {"context", "qas": [{"question", "answers"}]}, after a line {"header"};
- PwC: {"input", "prompt", "answer"}, where the input is the context;
- Alpaca, Alpaca+: {"instruction", "input", "output"}, where the instruction is the context (GistPool, section 2);
- CNN/DailyMail: {"article", "highlights"}, without a question;
- RACE: {"article", "questions", "options", "answers"}, or one question each with "question" and "answer";
- DROP of the hub: {"passage", "question", "answers_spans"};
- NarrativeQA of the hub: {"document": {"summary": {"text"}}, "question": {"text"}, "answers": [{"text"}]}.

A file is JSON lines, a JSON array, CSV or Parquet of such records, or one of the documents that SQuAD (1.1 and 2.0)
and DROP come in. The lab reads folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gistkit.formats import files, parquet

# The beginning of a document, as opposed to JSON lines.
_SQUAD = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
_DROP = re.compile(r'\s*\{\s*"[^"]*"\s*:\s*\{\s*"(passage|qa_pairs|wiki_url)"')


class Asked(NamedTuple):
    """A question: `where` it stands, its context, the question, None for a summary, and the right answers."""

    where: str
    context: str
    question: str | None
    answers: tuple[str, ...]


class Fields(NamedTuple):
    """A record, whose fields are checked when they are read; `where` it stands."""

    where: str
    values: Mapping[str, Any]

    def error(self, field: str, expected: str) -> ValueError:
        return ValueError(f"{self.where}, {field!r}: expected {expected}, got {self.values.get(field)!r:.80}")

    def text(self, field: str, *, empty: bool = False) -> str:
        """A text, which may be empty only where `empty`."""
        value = self.values.get(field)
        if not isinstance(value, str) or not (empty or value.strip()):
            raise self.error(field, "a text" if empty else "a text that is not empty")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of at least one text."""
        value = self.values.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise self.error(field, "a list of at least one text")
        return tuple(value)

    def inside(self, field: str) -> Fields:
        value = self.values.get(field)
        if not isinstance(value, Mapping):
            raise self.error(field, "an object")
        return Fields(f"{self.where}, {field!r}", value)

    def each(self, field: str) -> Iterator[Fields]:
        value = self.values.get(field)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.error(field, "a list of objects")
        for index, item in enumerate(value):
            yield Fields(f"{self.where}, {field!r}[{index}]", item)


def file_questions(path: Path) -> Iterator[Asked]:
    """The questions of a file, one at a time; errors as in `gistkit.formats.read_questions`."""
    if path.suffix == parquet.SUFFIX:
        yield from of_records(parquet.rows(path))
        return
    start = files.head(path)
    if files.suffix_of(path) == ".csv":
        yield from of_records(files.rows(path))
    elif _SQUAD.match(start):
        for index, article in files.members(path, "data"):
            yield from _squad(f"{path}, data[{index}]", article)
    elif _DROP.match(start):
        for name, passage in files.members(path):
            yield from _drop(f"{path}, {name!r}", passage)
    else:
        yield from of_records(files.records(path))


def of_records(records: Iterable[tuple[str, Any]]) -> Iterator[Asked]:
    """The questions of (where, record), each of a form of its own."""
    for where, values in records:
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
        # MRQA's first line.
        if set(values) == {"header"}:
            continue
        form = next((form for keys, form in _FORMS if keys <= values.keys()), _plain)
        yield from form(Fields(where, values))


def _plain(row: Fields) -> Iterator[Asked]:
    context, question = row.text("context"), row.text("question", empty=True)
    if isinstance(row.values.get("answers"), Mapping):
        # SQuAD of the hub; its second version has questions without an answer.
        answers = row.inside("answers")
        if answers.values.get("text") != []:
            yield Asked(row.where, context, question, _different(answers.texts("text")))
        return
    yield Asked(row.where, context, question, row.texts("answers"))


def _mrqa(row: Fields) -> Iterator[Asked]:
    context = row.text("context")
    for asked in row.each("qas"):
        yield Asked(asked.where, context, asked.text("question", empty=True), asked.texts("answers"))


def _pwc(row: Fields) -> Iterator[Asked]:
    yield Asked(row.where, row.text("input"), row.text("prompt"), (row.text("answer"),))


def _alpaca(row: Fields) -> Iterator[Asked]:
    question = row.text("input", empty=True) if "input" in row.values else ""
    # Some answers of Self-Instruct are empty: there is nothing to learn or to measure.
    if row.text("output", empty=True).strip():
        yield Asked(row.where, row.text("instruction"), question, (row.text("output"),))


def _cnn(row: Fields) -> Iterator[Asked]:
    # A few articles of CNN/DailyMail are empty.
    if row.text("article", empty=True).strip():
        yield Asked(row.where, row.text("article"), None, (row.text("highlights"),))


def _race(row: Fields) -> Iterator[Asked]:
    article = row.text("article")
    questions, letters = row.texts("questions"), row.texts("answers")
    options = row.values.get("options")
    if not isinstance(options, list) or not len(options) == len(questions) == len(letters):
        expected = f"a list of options for each of {len(questions)} questions and {len(letters)} answers"
        raise row.error("options", expected)
    for index, (question, choices, letter) in enumerate(zip(questions, options, letters, strict=True)):
        fields = {"question": question, "options": choices, "answer": letter}
        yield _choice(Fields(f"{row.where}, 'questions'[{index}]", fields), article)


def _race_row(row: Fields) -> Iterator[Asked]:
    yield _choice(row, row.text("article"))


def _choice(row: Fields, article: str) -> Asked:
    """A question with its options below it; the answer is the text of the right one.

    The letter would not be enough: SQuAD's normalisation takes "a" for an article, and leaves nothing of it.
    """
    options, letter = row.texts("options"), row.text("answer").strip()
    index = ord(letter) - ord("A") if len(letter) == 1 else -1
    if not 0 <= index < len(options):
        raise row.error("answer", f"a letter from A to {chr(ord('A') + len(options) - 1)}")
    listed = "".join(f"\n{chr(ord('A') + place)}. {option}" for place, option in enumerate(options))
    return Asked(row.where, article, row.text("question", empty=True) + listed, (options[index],))


def _drop_row(row: Fields) -> Iterator[Asked]:
    spans = row.inside("answers_spans").texts("spans")
    yield Asked(row.where, row.text("passage"), row.text("question"), (", ".join(spans),))


def _narrative_row(row: Fields) -> Iterator[Asked]:
    context = row.inside("document").inside("summary").text("text")
    answers = tuple(answer.text("text") for answer in row.each("answers"))
    if not answers:
        raise row.error("answers", "at least one")
    yield Asked(row.where, context, row.inside("question").text("text"), _different(answers))


_Form = Callable[[Fields], Iterator[Asked]]
# The keys of each form, and what reads it; the first that a record has.
_FORMS: tuple[tuple[frozenset[str], _Form], ...] = (
    (frozenset({"context", "qas"}), _mrqa),
    (frozenset({"input", "prompt", "answer"}), _pwc),
    (frozenset({"instruction", "output"}), _alpaca),
    (frozenset({"article", "highlights"}), _cnn),
    (frozenset({"article", "questions", "options"}), _race),
    (frozenset({"article", "question", "options"}), _race_row),
    (frozenset({"passage", "question", "answers_spans"}), _drop_row),
    (frozenset({"document", "question", "answers"}), _narrative_row),
)


def _squad(where: str, values: Any) -> Iterator[Asked]:
    """The questions of an article; those that have no answer, in the second version, are left out."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
    for paragraph in Fields(where, values).each("paragraphs"):
        context = paragraph.text("context")
        for asked in paragraph.each("qas"):
            answers = tuple(answer.text("text") for answer in asked.each("answers"))
            if answers:
                yield Asked(asked.where, context, asked.text("question"), _different(answers))
            elif asked.values.get("is_impossible") is not True:
                raise asked.error("answers", "at least one, or is_impossible")


def _drop(where: str, values: Any) -> Iterator[Asked]:
    """The questions of a passage. An answer is a number, spans joined by commas, or a date."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
    row = Fields(where, values)
    passage = row.text("passage")
    for asked in row.each("qa_pairs"):
        others = asked.each("validated_answers") if "validated_answers" in asked.values else ()
        answers = [_drop_answer(answer) for answer in (asked.inside("answer"), *others)]
        # A few validated answers are empty.
        if not answers[0]:
            raise asked.error("answer", "a number, spans or a date")
        yield Asked(asked.where, passage, asked.text("question"), _different(filter(None, answers)))


def _drop_answer(answer: Fields) -> str:
    number = str(answer.values.get("number", "")).strip()
    if number:
        return number
    if answer.values.get("spans"):
        return ", ".join(answer.texts("spans"))
    date = answer.inside("date").values if answer.values.get("date") else {}
    return " ".join(part for name in ("day", "month", "year") if (part := str(date.get(name, "")).strip()))


def _different(answers: Iterable[str]) -> tuple[str, ...]:
    """Each answer once: several people gave the same."""
    return tuple(dict.fromkeys(answers))
