"""Tables of runs: a column is a function of an arm and its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from statistics import mean
from typing import Any, TypeAlias

from gistkit.evaluate.report import format_table

Rows: TypeAlias = list[list[str]]
Cell: TypeAlias = Callable[[Any, Sequence[Any]], str]


def spread(values: Sequence[float], form: str | Callable[[float], str] = "{:.3f}", to: str = "-") -> str:
    """One value as it is; several seeds' as mean (lowest-highest), with `to` between these."""
    shown = form.format if isinstance(form, str) else form
    if len(values) == 1:
        return shown(values[0])
    return f"{shown(mean(values))} ({shown(min(values))}{to}{shown(max(values))})"


def name_of(name: Callable[[Any], str] | Mapping[Any, str]) -> Cell:
    """A column with a name of the arm; "-" where a mapping lacks it."""
    return lambda arm, runs: name.get(arm, "-") if isinstance(name, Mapping) else name(arm)


def figure_of(value: Callable[[Any], float], form: str | Callable[[float], str] = "{:.3f}") -> Cell:
    """A column with a figure of the runs."""
    return lambda arm, runs: spread([value(run) for run in runs], form)


def of_split(split: str, *names: str, form: str | Callable[[float], str] = "{:.3f}", times: float = 1.0) -> Cell:
    """A column with a figure of a split of the runs, which is found by its names one within the other."""
    return figure_of(lambda run: times * reduce(getitem, names, getattr(run, split)), form)


SEEDS: Cell = lambda arm, runs: str(len(runs))  # noqa: E731
SECONDS = figure_of(lambda run: run.seconds, "{:.0f} s")


def tabulate(arms: Mapping[Any, Sequence[Any]], columns: Mapping[str, Cell]) -> Rows:
    """Header and one row an arm."""
    return [list(columns), *([cell(arm, runs) for cell in columns.values()] for arm, runs in arms.items())]


def drop_column(rows: Rows, column: str) -> Rows:
    """Rows without the column of a heading."""
    dropped = rows[0].index(column)
    return [row[:dropped] + row[dropped + 1 :] for row in rows]


def joined(tables: Sequence[Rows]) -> str:
    """The tables that have a row, one below the other."""
    return "\n\n".join(format_table(rows) for rows in tables if len(rows) > 1)
