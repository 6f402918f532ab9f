"""Sets of questions: the files, folders and names of the hub that hold them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gistkit.common.messages import one_line
from gistkit.common.plugins import brought
from gistkit.formats import files, hub, parquet
from gistkit.formats.questions import Asked, file_questions, of_records

LAB = "NarrativeQA, FairytaleQA, RACE and CNN/DailyMail's stories are read with pip install ./lab"
SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", parquet.SUFFIX)


class QuestionSet(NamedTuple):
    """A set of questions: its name, and its file or folder."""

    name: str
    path: Path


def read_questions(path: str | Path | Iterable[Mapping[str, Any]], split: str | None = None) -> Iterator[Asked]:
    """The questions of a set, one at a time.

    Args:
        path: a file (`gistkit.formats.questions` lists the formats), a folder that is one data set, which the lab
            reads (`gistkit_lab.evaluate.folders`), or "hf:owner/name" or "hf:owner/name:configuration" of the Hugging
            Face hub, whose rows are in one of these formats; that needs the package `datasets` and a network. Or the
            rows themselves, such as a split of `datasets`: anything that gives mappings.
        split: "train", "validation" or "test", of a folder or a name that has several; None: all of a folder, and
            "train" of a name. Rows are of one split.

    Raises:
        OSError: if there is no such file.
        ImportError: if a package is missing that reads it.
        ValueError: naming the file, the line or the place in the document, and the field of what is not as expected.
    """
    if not isinstance(path, str | Path):
        yield from of_records((f"rows[{index}]", row) for index, row in enumerate(path))
    elif (name := hub.name_of(path)) is not None:
        yield from of_records(hub.rows(name, split or "train"))
    elif Path(path).is_dir():
        if (reader := _reader(Path(path))) is None:
            raise FileNotFoundError(f"{path}: expected a file of questions, got a folder that is no data set; {LAB}")
        yield from reader.folder_questions(Path(path), split)
    else:
        yield from file_questions(Path(path))


def question_sets(paths: Sequence[str | Path], split: str | None = None) -> list[QuestionSet]:
    """The sets of files, folders and names as in `read_questions`; in a folder of several sets each file is one.

    Files of the same name are named with their folder, too.

    Args:
        paths: the files, folders and names.
        split: "train", "validation" or "test": where names in a folder of several sets show several splits, its files
            of the others are left out. None: all files.

    Raises:
        FileNotFoundError: if a path is not there, or a folder has no file of questions, or none of this split.
        ValueError: if two sets are the same.
    """
    found: list[QuestionSet] = []
    for root in map(Path, paths):
        if (hub_name := hub.name_of(root)) is not None:
            found.append(QuestionSet(hub_name, root))
            continue
        if not root.exists():
            raise FileNotFoundError(f"{root}: expected a file of questions or a folder of them, found none")
        several = root.is_dir() and _reader(root) is None
        found += [QuestionSet(_name(path), path) for path in (_files(root, split) if several else [root])]
    longer: tuple[Callable[[Path], str], ...] = (lambda path: f"{path.resolve().parent.name}/{_name(path)}", str)
    for name_of in longer:
        counts = Counter(each.name for each in found)
        found = [each._replace(name=name_of(each.path)) if counts[each.name] > 1 else each for each in found]
    if same := [name for name, count in Counter(each.name for each in found).items() if count > 1]:
        raise ValueError(f"questions: expected different sets, got {same[0]} twice")
    return found


def _reader(folder: Path) -> Any:
    """The module of another distribution that reads a folder as one data set; None: there is none."""
    for entry in brought("gistkit.formats"):
        try:
            reader = entry.load()
        except Exception as error:
            # A broken distribution must not break the library's own formats.
            name = entry.dist.name if entry.dist else entry.value
            warnings.warn(f"{name}: cannot be loaded: {one_line(error)}; {LAB}", stacklevel=2)
            continue
        if reader.is_one_set(folder):
            return reader
    return None


def _files(folder: Path, split: str | None) -> list[Path]:
    chosen = sorted(path for path in folder.rglob("*") if path.is_file() and files.suffix_of(path) in SUFFIXES)
    if not chosen:
        raise FileNotFoundError(f"{folder}: expected {', '.join(SUFFIXES)} files of questions, got none; {LAB}")
    if named := [path.name for path in chosen if path.name.endswith(("qaps.csv", "-questions.csv"))]:
        raise ValueError(f"{folder}: expected files of questions, got {named[0]}; {LAB}")
    splits = {path: files.split_of(path.relative_to(folder)) for path in chosen}
    if split is None or len(set(splits.values())) == 1:
        return chosen
    if not (own := [path for path in chosen if splits[path] in (split, "")]):
        names = ", ".join(sorted(set(splits.values())))
        raise FileNotFoundError(f"{folder}: expected files of the split {split!r}, got those of {names}")
    return own


def _name(path: Path) -> str:
    if path.is_dir():
        return path.resolve().name
    return (path.with_suffix("") if path.suffix in files.COMPRESSED else path).stem
