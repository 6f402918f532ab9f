"""A matrix of one figure by training set and test set, from saved reports (GistPool, Tables 6 to 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gistkit.evaluate.report import COLUMNS, Report, Row, format_table

# Keys of a report's settings.
TRAINED_ON, TESTED_ON = "trained_on", "tested_on"
# Classes of methods that no set was trained for.
UNTRAINED = ("FullContext", "NoContextBaseline", "SummaryContext")
_HEADINGS = {name: (heading, form) for name, heading, form in COLUMNS}


@dataclass(frozen=True)
class CrossTable:
    """A figure of compressors by what they were trained on and what they were tested on.

    Args:
        metric: its name, one of a Row's.
        values: by (training set, test set).
    """

    metric: str
    values: Mapping[tuple[str, str], float]

    @property
    def trained_on(self) -> list[str]:
        """The training sets: those that are tested on too, in the order of the test sets, then the others, mixtures."""
        found = list(dict.fromkeys(train for train, _ in self.values))
        tested = self.tested_on
        return [name for name in tested if name in found] + [name for name in found if name not in tested]

    @property
    def tested_on(self) -> list[str]:
        """The test sets, in the order of the reports."""
        return list(dict.fromkeys(test for _, test in self.values))

    def table(self) -> str:
        """The matrix as a Markdown table, a row a training set; "-" where there is no report."""
        heading, form = _HEADINGS[self.metric]
        # Bytes stand as KiB there.
        scale = 1024 if self.metric == "cache_bytes" else 1
        rows = [[f"{heading}: trained on", *self.tested_on]]
        for train in self.trained_on:
            cells = [self.values.get((train, test)) for test in self.tested_on]
            rows.append([train, *("-" if cell is None else form.format(cell / scale) for cell in cells)])
        return format_table(rows)

    def __str__(self) -> str:
        return self.table()


def cross_table(
    reports: Sequence[Report | str | Path], *, metric: str = "qa_loss", method: str | None = None
) -> CrossTable:
    """The matrix of a figure over reports that each evaluate a compressor on one set.

    `gistkit evaluate --trained-on A --tested-on B` writes such reports. The training set may be a mixture, under any
    name. GistPool shows the loss of answers, "qa_loss", and the share of wrong ones, 100 less "qa_judge".

    Args:
        reports: reports, or files that `Report.save` wrote, with the settings "trained_on" and "tested_on".
        metric: one of a Row's metrics.
        method: the row of each report; None: the only one that is no baseline.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no report, one lacks what is asked for, or two are of the same two sets.
    """
    if metric not in _HEADINGS:
        raise ValueError(f"metric: expected one of {', '.join(_HEADINGS)}, got {metric!r}")
    if isinstance(reports, str | Path | Report) or not reports:
        raise ValueError(f"reports: expected a sequence of at least one report, got {reports!r:.80}")
    values: dict[tuple[str, str], float] = {}
    names: dict[tuple[str, str], str] = {}
    for index, given in enumerate(reports):
        name = f"reports[{index}]" if isinstance(given, Report) else str(given)
        report = given if isinstance(given, Report) else Report.load(given)
        sets = _setting(name, report, TRAINED_ON), _setting(name, report, TESTED_ON)
        if sets in names:
            raise ValueError(
                f"{name}: expected one report trained on {sets[0]} and tested on {sets[1]}, got {names[sets]} too"
            )
        row = row_of(name, report, method)
        if metric not in row.metrics:
            raise ValueError(f"{name}: expected the metric {metric} of {row.method}, got {', '.join(row.metrics)}")
        names[sets], values[sets] = name, row.metrics[metric]
    return CrossTable(metric, values)


def _setting(name: str, report: Report, key: str) -> str:
    value = report.settings.get(key)
    if not isinstance(value, str) or not value:
        option = key.replace("_", "-")
        raise ValueError(f"{name}: expected a report with the setting {key} (--{option}), got {value!r}")
    return value


def row_of(name: str, report: Report, method: str | None) -> Row:
    """The row of a method in a report, which messages call `name`; None: of the only one that is no baseline.

    Raises:
        ValueError: if there is none, or several without a method.
    """
    if method is not None:
        try:
            return report[method]
        except KeyError as error:
            raise ValueError(f"{name}: {error.args[0]}") from error
    described = report.settings.get("methods", {})
    trained = [row for row in report.rows if described.get(row.method, {}).get("class") not in UNTRAINED]
    if len(trained) != 1:
        raise ValueError(
            f"{name}: expected one method beside the baselines, or its name as `method`, got "
            f"{', '.join(row.method for row in trained) or 'none'}"
        )
    return trained[0]
