"""Tables and pictures of the results that studies leave as JSON, whichever study it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Study:
    """How the results of one study are shown.

    Args:
        read: of a file, the runs and what they have in common: their recipe.
        table: of both, text.
        figures: of both, by name.
    """

    read: Callable[[Path], tuple[list[Any], Any]]
    table: Callable[[list[Any], Any], str]
    figures: Callable[[list[Any], Any], Mapping[str, Figure]]


def table(*paths: Path | str) -> str:
    """The table of a study's results.

    Args:
        paths: a results file, or several of one study and recipe, whose runs are put together.

    Raises:
        ValueError: a file that holds something else, or files of different studies or recipes, or of the same runs.
    """
    study, runs, recipe = _read(paths)
    return study.table(runs, recipe)


def draw(*paths: Path | str) -> dict[str, Figure]:
    """The pictures of a study's results, by name; none where a study has none. Arguments and errors as of `table`."""
    study, runs, recipe = _read(paths)
    return dict(study.figures(runs, recipe))


def _read(paths: tuple[Path | str, ...]) -> tuple[Study, list[Any], Any]:
    if not paths:
        raise ValueError("paths: expected at least one results file, got none")
    first, name = Path(paths[0]), ""
    runs: list[Any] = []
    recipe = None
    for path in map(Path, paths):
        its_name = _name(path)
        if name and its_name != name:
            raise ValueError(f"{path}: expected results of the study {name}, as {first}, got {its_name}")
        name, study = its_name, STUDIES[its_name]()
        try:
            found, its_recipe = study.read(path)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: expected results of the study {name}, got others: {error!r}") from error
        if not found:
            raise ValueError(f"{path}: expected at least one run, got none")
        if runs and its_recipe != recipe:
            raise ValueError(f"{path}: expected the recipe of {first}, got another {_changes(recipe, its_recipe)}")
        if any(run in runs for run in found):
            raise ValueError(f"{path}: expected runs that no file before has, got some a second time")
        runs, recipe = [*runs, *found], its_recipe
    return study, runs, recipe


def _name(path: Path) -> str:
    """Which study wrote a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a study's results as JSON, got another file: {error}") from error
    name = content.get("study") if isinstance(content, dict) else None
    if not isinstance(name, str) or name not in STUDIES:
        got = "no field study" if name is None else f"study {name!r}"
        raise ValueError(f"{path}: expected results of one of the studies {', '.join(STUDIES)}, got {got}")
    return name


def _changes(first: Any, other: Any) -> str:
    if not (is_dataclass(first) and is_dataclass(other)):
        return str(other)
    old, new = asdict(first), asdict(other)  # type: ignore[arg-type]
    return ", ".join(key for key in old if old[key] != new.get(key))


def _lines(rows: list[list[str]]) -> str:
    from gistkit.evaluate.report import format_table

    return format_table(rows)


def _epl() -> Study:
    from gistkit.studies import report

    return Study(report.read_json, lambda runs, _: _lines(report.table_rows(runs)), report.figures)


def _smollm2() -> Study:
    from gistkit.studies import report, smollm2

    return Study(
        partial(report.read_json, recipe=smollm2.Recipe),
        lambda runs, recipe: _lines(report.table_rows(runs, recipe.method)),
        partial(report.figures, last_layer=True),
    )


def _compression_loss() -> Study:
    from gistkit.studies import compression_loss, report

    return Study(
        partial(report.read_json, recipe=compression_loss.Recipe),
        lambda runs, _: _lines(compression_loss.table_rows(runs)),
        partial(report.figures, legend="setting"),
    )


def _pooling() -> Study:
    from gistkit.studies import pooling_report as report

    return Study(report.read_json, report.format_results, lambda runs, _: report.figures(runs))


def _in_place() -> Study:
    from gistkit.studies import in_place_report as report

    return Study(
        report.read_json,
        lambda runs, _: _lines(report.table_rows(runs, "test")),
        lambda runs, _: report.figures(runs),
    )


def _nuggets() -> Study:
    from gistkit.studies import nuggets_report as report

    def tables(runs: list[Any], _: Any) -> str:
        found = [rows for rows in (report.language_rows(runs), report.reconstruction_rows(runs)) if len(rows) > 1]
        return "\n\n".join(map(_lines, found))

    return Study(report.read_json, tables, lambda runs, _: report.figures(runs))


def _greedy() -> Study:
    from gistkit.studies import greedy_report as report

    return Study(report.read_json, report.format_results, lambda runs, _: {})


def _length() -> Study:
    from gistkit.studies import extrapolation_report as report

    return Study(
        report.read_length,
        lambda runs, _: f"{_lines(report.length_rows(runs))}\n\n{_lines(report.paper_length_rows())}",
        lambda runs, _: report.length_figures(runs),
    )


def _retrieval() -> Study:
    from gistkit.studies import extrapolation_report as report

    def tables(runs: list[Any], _: Any) -> str:
        parts = [f"{name}:\n{_lines(report.retrieval_rows(runs, name))}" for name in ("exact", "perplexity")]
        return "\n\n".join([*parts, _lines(report.paper_retrieval_rows())])

    return Study(report.read_retrieval, tables, lambda runs, _: report.retrieval_figures(runs))


def _resolution() -> Study:
    from gistkit.studies import resolution_report as report

    return Study(
        report.read_json,
        lambda runs, _: f"{_lines(report.table_rows(runs))}\n\n{_lines(report.paper_rows())}",
        lambda runs, _: report.figures(runs),
    )


# By what the files have as their study; what a study needs is imported when one of its files is shown.
STUDIES: dict[str, Callable[[], Study]] = {
    "epl": _epl,
    "smollm2": _smollm2,
    "compression-loss": _compression_loss,
    "pooling": _pooling,
    "in-place": _in_place,
    "nuggets": _nuggets,
    "greedy": _greedy,
    "length": _length,
    "retrieval": _retrieval,
    "resolution": _resolution,
}
