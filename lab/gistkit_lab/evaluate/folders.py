"""Data sets of questions that are published as folders: NarrativeQA, FairytaleQA, RACE and CNN/DailyMail's stories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from gistkit.formats import files
from gistkit.formats.questions import Asked, of_records

SPLITS = ("train", "validation", "test")
# The names of splits in folders and files.
_NAMES = {"validation": ("validation", "valid", "val", "dev")}


def split_names(split: str | None) -> tuple[str, ...]:
    """What a split is called in published data; all names for None."""
    if split is None:
        return tuple(name for each in SPLITS for name in split_names(each))
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    return _NAMES.get(split, (split,))


def is_one_set(folder: Path) -> bool:
    """Whether a folder is one of these data sets, and not several files of questions."""
    return _kind(folder) is not None


def folder_questions(folder: Path, split: str | None = None) -> Iterator[Asked]:
    """The questions of such a folder.

    - NarrativeQA: qaps.csv, whose contexts are the summaries of third_party/wikipedia/summaries.csv.
    - FairytaleQA: questions/SPLIT/X-questions.csv, whose contexts are whole stories, all sections of
      section-stories/SPLIT/X-story.csv (GistPool's contexts are so long).
    - RACE: SPLIT/high/N.txt and SPLIT/middle/N.txt, a JSON object each.
    - CNN/DailyMail: X.story, an article and its highlights.

    Args:
        folder: the folder.
        split: "train", "validation" or "test", where there are folders or rows of these names; None: all.

    Raises:
        FileNotFoundError: if it has no such files, or none of this split.
        ValueError: as `gistkit.formats.read_questions`.
    """
    names = split_names(split)
    kind = _kind(folder)
    if kind is None:
        raise FileNotFoundError(f"{folder}: expected NarrativeQA, FairytaleQA, RACE or .story files, got none of them")
    if kind == "narrativeqa":
        yield from _narrativeqa(folder, names)
        return
    every = sorted(_files_of(folder, kind))
    # Without folders of splits there is one.
    if any(not set(split_names(None)).isdisjoint(file.relative_to(folder).parts) for file in every):
        every = [file for file in every if not set(names).isdisjoint(file.relative_to(folder).parts)]
    if not every:
        raise FileNotFoundError(f"{folder}: expected files in a folder {' or '.join(names)}, got none")
    for file in every:
        if kind == "fairytaleqa":
            yield from _fairytaleqa(file)
        elif kind == "race":
            yield from of_records([(str(file), _object(file))])
        else:
            yield from _story(file)


def _kind(folder: Path) -> str | None:
    if (folder / "qaps.csv").is_file():
        return "narrativeqa"
    for kind in ("fairytaleqa", "cnn", "race"):
        if next(iter(_files_of(folder, kind)), None) is not None:
            return kind
    return None


def _files_of(folder: Path, kind: str) -> Iterator[Path]:
    if kind == "fairytaleqa":
        # The other folder of the published data holds the same files once more.
        root = folder / "data-by-train-split"
        return (root if root.is_dir() else folder).glob("questions/**/*-questions.csv")
    if kind == "cnn":
        return folder.rglob("*.story")
    return (file for level in ("high", "middle") for file in folder.glob(f"**/{level}/*.txt"))


def _narrativeqa(folder: Path, names: Sequence[str]) -> Iterator[Asked]:
    """Questions about summaries, which are some megabytes and are kept."""
    file = folder / "third_party" / "wikipedia" / "summaries.csv"
    file = file if file.is_file() else folder / "summaries.csv"
    summaries: dict[str, str] = {}
    for where, row in files.rows(file):
        _columns(where, row, "document_id", "set", "summary")
        if row["set"] in names:
            summaries[row["document_id"]] = row["summary"].strip()
    for where, row in files.rows(folder / "qaps.csv"):
        _columns(where, row, "document_id", "set", "question", "answer1", "answer2")
        if row["set"] not in names:
            continue
        if row["document_id"] not in summaries:
            raise ValueError(f"{where}, 'document_id': expected one of {file}, got {row['document_id']!r:.60}")
        answers = [row[name] for name in ("answer1", "answer2") if row[name].strip()]
        plain = {"context": summaries[row["document_id"]], "question": row["question"], "answers": answers}
        yield from of_records([(where, plain)])


def _fairytaleqa(questions: Path) -> Iterator[Asked]:
    story = _beside(questions) / f"{questions.name.removesuffix('-questions.csv')}-story.csv"
    sections = []
    for where, row in files.rows(story):
        _columns(where, row, "section", "text")
        sections.append(row["text"].strip())
    context = "\n".join(sections)
    for where, row in files.rows(questions):
        _columns(where, row, "question", "answer1")
        answers = [text for number in range(1, 7) if (text := row.get(f"answer{number}", "").strip())]
        plain = {"context": context, "question": row["question"], "answers": list(dict.fromkeys(answers))}
        yield from of_records([(where, plain)])


def _beside(questions: Path) -> Path:
    """The folder of stories that belongs to a file in .../questions/...: it differs by one name."""
    parts = list(questions.parent.parts)
    parts[len(parts) - 1 - parts[::-1].index("questions")] = "section-stories"
    return Path(*parts)


def _object(file: Path) -> object:
    try:
        return json.loads(file.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected a JSON object in UTF-8, got something else ({error})") from error


def _story(file: Path) -> Iterator[Asked]:
    """A news story; its summary is the highlights, a sentence each."""
    article: list[str] = []
    highlights: list[str] = []
    part = article
    for _, line in files.lines(file):
        text = line.strip()
        if text == "@highlight":
            part = highlights
        elif text:
            part.append(text)
    if not highlights:
        raise ValueError(f"{file}: expected a line @highlight and a sentence after it, got none")
    # A few stories have no text.
    if article:
        yield Asked(str(file), "\n".join(article), None, ("\n".join(highlights),))


def _columns(where: str, row: dict[str, str], *expected: str) -> None:
    for name in expected:
        if name not in row:
            raise ValueError(f"{where}, {name!r}: expected a column of this name, got {', '.join(row):.80}")
