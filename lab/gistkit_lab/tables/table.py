"""A paper's table: its arms, the commands of each, and the columns that are read from what they write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gistkit.evaluate.report import COLUMNS, format_table
from gistkit.train.metrics import read_metrics

TRAIN, EVALUATE, JUDGE = "train", "evaluate", "judge"
REPORT, COMPRESSOR, METRICS = "evaluation.json", "compressor", "metrics.jsonl"
# More examples than any set has.
ALL = "1000000000"
_FORMS = {name: form for name, _, form in COLUMNS}


@dataclass(frozen=True)
class Stage:
    """A command of an arm.

    Args:
        command: "train", "evaluate" or "judge".
        words: its options without the model, the folder and what says which compressor; "{name}" is the user's data.
        settings: options that say which compressor is new.
        start: the stage before it whose compressor is trained further, or measured; None: a new one.
        reports: of "judge", the two stages before it whose answers are compared.
        folder: of its run where arms of different folders share it; None: the arm's.
    """

    command: str
    words: Sequence[str]
    settings: Sequence[str] = ()
    start: str | None = None
    reports: Sequence[str] = ()
    folder: str | None = None

    @property
    def result(self) -> str:
        """What is in its folder when it has ended."""
        return COMPRESSOR if self.command == TRAIN else REPORT


@dataclass(frozen=True)
class Column:
    """A figure of each arm.

    Args:
        heading: as the paper has it.
        stage: of the arm, an evaluation.
        metric: a key of `Row.metrics`.
        of: the beginning of a set's name in small letters, or a domain whose mean is meant; None: the only report.
    """

    heading: str
    stage: str
    metric: str
    of: str | None = None

    @property
    def form(self) -> str:
        """How a figure is written."""
        return _FORMS[self.metric]

    def value(self, folder: Path, row: str = "") -> float | None:
        """The figure in the first row of a stage's report whose method's name begins so; None: there is none."""
        path = folder / REPORT
        if not path.exists():
            return None
        report = json.loads(path.read_text(encoding="utf-8"))
        rows = report["rows"] if self.of is None else self._rows(report)
        return next((each["metrics"].get(self.metric) for each in rows if each["method"].startswith(row)), None)

    def _rows(self, report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        for mean in report.get("means", ()):
            if mean["domain"] == self.of:
                return mean["rows"]  # type: ignore[no-any-return]
        for each in report.get("sets", ()):
            if "".join(filter(str.isalpha, each["name"].lower())).startswith(str(self.of)):
                return each["rows"]  # type: ignore[no-any-return]
        return ()


@dataclass(frozen=True)
class WrongAnswers(Column):
    """The share of answers that a judge finds wrong, in percent, where the metric is the mean of its scores, 0..100."""

    form = "{:.1f}"

    def value(self, folder: Path, row: str = "") -> float | None:
        score = super().value(folder, row)
        return None if score is None else 100 - score


@dataclass(frozen=True)
class TrainingLoss(Column):
    """The last held-out loss of a training, in nats a token; the metric is the loss's name."""

    form = "{:.2f}"

    def value(self, folder: Path, row: str = "") -> float | None:
        path = folder / METRICS
        if not path.exists():
            return None
        held_out = [record["held_out"] for record in read_metrics(path) if "held_out" in record]
        return held_out[-1].get(self.metric) if held_out else None


def by_heading(columns: Sequence[Column], figures: Sequence[Any]) -> dict[str, Any]:
    """A paper's figures of an arm, from left to right; it has none where they are None, or end."""
    pairs = zip(columns, figures, strict=False)
    return {column.heading: figure for column, figure in pairs if figure is not None}


@dataclass(frozen=True)
class Arm:
    """A row of a table.

    Args:
        title: as the paper has it.
        folder: of its runs; arms and tables of one paper that have the same runs share them.
        stages: by name, in the order in which they run. "15x/finetune" is that of another arm, whose folder is 15x;
            options of the user are for "finetune", and those for "answers" also for "answers-squad".
        published: the paper's figures by heading; several where its stored text leaves open which.
        row: the beginning of its method's name in reports of several rows; "": the first one.
    """

    title: str
    folder: str
    stages: Mapping[str, Stage]
    published: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    row: str = ""

    def folder_of(self, stage: str) -> Path:
        """Of a stage's results, if the arm has it, in that of the paper."""
        own = self.stages.get(stage)
        shared = None if own is None else own.folder
        return Path(stage) if "/" in stage else Path(shared or self.folder) / stage


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Args:
        follows: the paper and the number of the table.
        paper: names the folder that its tables share.
        model: the paper's.
        data: what the user gives, by name, and what it is in the paper.
        columns: from left to right.
        arms: from top to bottom.
        open: what the paper does not say and what is chosen here, or what is left out.
        picture: whether its figures are drawn beside it, by the lengths that are its headings.
    """

    follows: str
    paper: str
    model: str
    data: Mapping[str, str]
    columns: Sequence[Column]
    arms: Sequence[Arm]
    open: Sequence[str] = ()
    picture: bool = False

    @property
    def about(self) -> str:
        """What it follows, what it needs, and what its paper does not say, in lines."""
        lines = [self.follows, f"  its model: {self.model}"]
        lines += [f"  --data {name}=PATH: {purpose}" for name, purpose in self.data.items()]
        return "\n".join([*lines, *(f"  - {point}" for point in self.open)])

    def markdown(self, out: Path) -> str:
        """The table of what is in the runs' folder, each figure with the paper's in parentheses; "-" is missing."""
        lines = [["ours (paper)", *(column.heading for column in self.columns)]]
        for arm in self.arms:
            cells = [arm.title]
            for column in self.columns:
                ours, form = column.value(out / arm.folder_of(column.stage), arm.row), column.form
                shown = "-" if ours is None else form.format(ours)
                published = arm.published.get(column.heading, ())
                paper = [published] if isinstance(published, int | float) else published
                cells.append(f"{shown} ({' or '.join(map(form.format, paper))})" if paper else shown)
            lines.append(cells)
        return format_table(lines)

    def by_length(self, out: Path) -> dict[str, dict[int, list[float]]]:
        """{arm: {heading: [figure]}} of what is in the runs' folder, for its picture."""
        found = {}
        for arm in self.arms:
            values = {int(each.heading): each.value(out / arm.folder_of(each.stage), arm.row) for each in self.columns}
            found[arm.title] = {heading: [value] for heading, value in values.items() if value is not None}
        return found

    def choose(self, titles: Sequence[str]) -> Table:
        """The table with these arms alone.

        Raises:
            ValueError: if it has no arm of a title.
        """
        known = {arm.title: arm for arm in self.arms}
        if unknown := [title for title in titles if title not in known]:
            raise ValueError(f"arms: expected some of {', '.join(known)}, got {unknown[0]!r}")
        return replace(self, arms=tuple(known[title] for title in titles))


@dataclass(frozen=True)
class Run:
    """A stage of an arm that can be run.

    Args:
        arm, stage: whose it is, and its name.
        words: of `gistkit`.
        new: the words of the same training with a new compressor, whose cost is estimated; of an evaluation none.
        folder: of its results.
        result: the file or folder that is there when it has ended.
        sources: folders of the runs that it starts from or compares.
    """

    arm: str
    stage: str
    words: Sequence[str]
    new: Sequence[str]
    folder: Path
    result: Path
    sources: Sequence[Path] = ()

    @property
    def title(self) -> str:
        """The arm and the stage."""
        return f"{self.arm}, {self.stage}"


@dataclass(frozen=True)
class Choices:
    """What the user chooses for all runs.

    Args:
        model: as --model.
        data: by the names of `Table.data`; a value may have several words, files of questions.
        out: folder of the paper's runs.
        shared: more words of each command, such as --device.
        more: more words of a stage, by its name or the beginning of that, up to a hyphen, after the others.
    """

    model: str
    out: Path
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shared: Sequence[str] = ()
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def more_of(self, stage: str) -> Sequence[str]:
        """More words of a stage: of all like it, and its own, which count where both say the same."""
        return [word for name in names_of(stage) for word in self.more.get(name, ())]


def names_of(stage: str) -> Sequence[str]:
    """What a stage may be called: the beginning of its name up to a hyphen, and its name; without another folder."""
    name = stage.rpartition("/")[2]
    return tuple(dict.fromkeys((name.partition("-")[0], name)))


def runs(table: Table, choices: Choices) -> Iterator[Run]:
    """The runs of a table, in the order in which they are made, those that arms share once.

    Raises:
        ValueError: for data that the table does not have, or more words of a stage that no arm has.
    """
    for name, given, known in (
        ("data", choices.data, table.data),
        ("more", choices.more, {name: "" for arm in table.arms for stage in arm.stages for name in names_of(stage)}),
    ):
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {unknown[0]!r}")
    seen: set[Path] = set()
    for arm in table.arms:
        for name, stage in arm.stages.items():
            folder = choices.out / arm.folder_of(name)
            if folder in seen:
                continue
            seen.add(folder)
            more = choices.more_of(name)
            begin, words = [stage.command], list(_filled(stage.words, choices.data))
            if stage.command == JUDGE:
                begin += [str(choices.out / arm.folder_of(each) / REPORT) for each in stage.reports]
            else:
                begin += ["--model", choices.model]
                words += choices.shared
            report = stage.command != TRAIN
            out = ["--out", str(folder / REPORT if report else folder)]
            new = source = list(stage.settings)
            if stage.start is not None:
                source = ["--compressor", str(choices.out / arm.folder_of(stage.start) / COMPRESSOR)]
                new = [*arm.stages[stage.start].settings, *_of_compressor(choices.more_of(stage.start))]
            yield Run(
                arm.title,
                name,
                [*begin, *source, *words, *more, *out],
                [] if report else [*begin, *new, *words, *more, *out],
                folder,
                folder / stage.result,
                [choices.out / arm.folder_of(each) for each in (stage.start, *stage.reports) if each],
            )


# Options that say which compressor is trained, and not how.
_OF_COMPRESSOR = (
    "--method", "--layout", "--chunk", "--ratio", "--lora", "--embedding-lora", "--option", "--window", "--baseline",
)  # fmt: skip


def _of_compressor(words: Sequence[str]) -> list[str]:
    """Those of a new compressor's options among the words, each with its value."""
    return [word for name, value in pairwise(words) if name in _OF_COMPRESSOR for word in (name, value)]


def _filled(words: Sequence[str], data: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for word in words:
        if word.startswith("{"):
            name = word.strip("{}")
            yield from data.get(name, (name.upper(),))
        else:
            yield word


def missing_data(table: Table, data: Mapping[str, Any]) -> list[str]:
    """The names of the data that the table's arms read and that are not given."""
    read = {word for arm in table.arms for stage in arm.stages.values() for word in stage.words}
    return [name for name in table.data if f"{{{name}}}" in read and name not in data]
