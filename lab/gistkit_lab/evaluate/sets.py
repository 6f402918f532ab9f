"""Several sets of questions: a report each, and the means over sets, in and out of MRQA's domain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from gistkit.common.files import write_text
from gistkit.compress import Compressor
from gistkit.evaluate.data import Example
from gistkit.evaluate.report import COLUMNS, Report, Row, cells, finite, format_table
from gistkit.formats import files, parquet
from gistkit_lab.evaluate.run import run

# What the mean is called of sets without a domain.
ALL = "all"
IN_DOMAIN, OUT_OF_DOMAIN = "in-domain", "out-of-domain"
# MRQA's sets by the letters that their names begin with (Fisch et al., 2019); EPL's Tables 16 and 17.
DOMAINS = {
    **dict.fromkeys(("squad", "newsqa", "triviaqa", "searchqa", "hotpotqa", "naturalquestions"), IN_DOMAIN),
    **dict.fromkeys(("bioasq", "drop", "duorc", "race", "relationextraction", "textbookqa"), OUT_OF_DOMAIN),
}


@dataclass(frozen=True)
class SetReports:
    """Reports on sets of examples by name, whose methods are the same.

    Args:
        reports: a Report each.
        domains: "in-domain" or "out-of-domain" of MRQA's sets; others are left out.
    """

    reports: Mapping[str, Report]
    domains: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Report:
        """The report on a set."""
        return self.reports[name]

    def means(self) -> dict[str, tuple[tuple[str, ...], tuple[Row, ...]]]:
        """{domain: (names of its sets, rows of means)}; "all" for the sets without a domain, if there are several.

        A mean is over sets, each of which counts the same whatever its size (macro average; EPL, Tables 4 and 16-19),
        of every figure that all of them have.
        """
        groups: dict[str, list[str]] = {}
        for name in self.reports:
            groups.setdefault(self.domains.get(name, ALL), []).append(name)
        if len(groups.get(ALL, ())) == 1:
            del groups[ALL]
        return {
            domain: (tuple(names), tuple(self._mean(row.method, names) for row in self.reports[names[0]].rows))
            for domain, names in groups.items()
        }

    def _mean(self, method: str, names: Sequence[str]) -> Row:
        rows = [self.reports[name][method] for name in names]
        shared = [name for name, _, _ in COLUMNS if all(name in row.metrics for row in rows)]
        metrics = {name: fmean(row.metrics[name] for row in rows) for name in shared}
        counts = {name: sum(row.counts.get(name, 0) for row in rows) for name in rows[0].counts}
        return Row(method, metrics, counts, sum(row.seconds for row in rows))

    def as_dict(self, *, examples: bool = False) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, numbers and texts: {"sets": [...], "means": [...]}."""
        return {
            "sets": [
                {"name": name, "domain": self.domains.get(name), **report.as_dict(examples=examples)}
                for name, report in self.reports.items()
            ],
            "means": [
                {"domain": domain, "sets": list(names), "rows": Report(rows, {}).as_dict()["rows"]}
                for domain, (names, rows) in self.means().items()
            ],
        }

    def save(self, path: str | Path, *, examples: bool = False) -> Path:
        """Writes JSON, as `Report.save`."""
        path = Path(path)
        content = json.dumps(finite(self.as_dict(examples=examples)), indent=1, allow_nan=False, ensure_ascii=False)
        write_text(path, content + "\n")
        return path

    def table(self) -> str:
        """A Markdown table with aligned columns: the methods of each set, and of each mean."""
        groups = [(name, report.rows) for name, report in self.reports.items()]
        for domain, (names, rows) in self.means().items():
            groups.append((f"mean of {len(names)} {'sets' if domain == ALL else domain}", rows))
        columns = [column for column in COLUMNS if any(column[0] in row.metrics for _, rows in groups for row in rows)]
        lines = [["set", "method", *(heading for _, heading, _ in columns)]]
        lines += [[name, *cells(row, columns)] for name, rows in groups for row in rows]
        return format_table(lines)

    def __str__(self) -> str:
        return self.table()


def run_sets(
    compressor: Compressor,
    tokenizer: Any | None,
    sets: Mapping[str, Callable[[], Sequence[Example]]],
    *,
    domains: Mapping[str, str] | None = None,
    **settings: Any,
) -> SetReports:
    """`run` on each of several sets, one after another.

    Args:
        compressor, tokenizer: as in `run`.
        sets: by name what gives a set's examples, asked for when its turn comes.
        domains: as in `SetReports`.
        settings: the other arguments of `run`.
    """
    if not sets:
        raise ValueError("sets: expected at least one, got none")
    reports = {name: run(compressor, tokenizer, examples(), **settings) for name, examples in sets.items()}
    return SetReports(reports, {} if domains is None else domains)


def domain_of(path: Path) -> str | None:
    """The domain of a file that begins with MRQA's header; its own name counts, where the header has no known one."""
    if path.is_dir() or path.suffix == parquet.SUFFIX:
        return None
    try:
        header = json.loads(files.head(path).lstrip().split("\n", 1)[0])["header"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    names = (header.get("dataset") if isinstance(header, dict) else None, path.name)
    for name in names:
        letters = "".join(filter(str.isalpha, str(name).lower()))
        for beginning, domain in DOMAINS.items():
            if letters.startswith(beginning):
                return domain
    return None
