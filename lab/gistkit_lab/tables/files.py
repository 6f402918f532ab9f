"""Tables and figures of the papers from TOML files, in which "-" is a figure that a paper has not.

A file of tables has for all of them the `paper`, and a `folder`, a `model`, points that are `open`, `data` by name,
`columns` by heading, `stages` by name, and values `common` to all rows. A table names those that it has, and an arm may
have stages of its own. A stage's words are those of a shell; $NAME is a value of the arm or of the table, and $all all
examples. A stage with `each` stands for several, $each of them.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

from gistkit_lab.tables.table import (
    ALL,
    EVALUATE,
    TRAIN,
    Arm,
    Column,
    Stage,
    Table,
    TrainingLoss,
    WrongAnswers,
    by_heading,
)

KINDS = {"figure": Column, "training loss": TrainingLoss, "wrong answers": WrongAnswers}


def published(paper: str) -> dict[str, Any]:
    """What a paper's file has, None for "-"."""

    def figures(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: figures(each) for key, each in value.items()}
        if isinstance(value, list):
            return [figures(each) for each in value]
        return None if value == "-" else value

    return figures(tomllib.loads(Path(__file__).with_name(f"{paper}.toml").read_text(encoding="utf-8")))  # type: ignore[no-any-return]


def read(paper: str) -> dict[str, Table]:
    """The tables of a paper's file, by name."""
    content = published(paper)
    return {name: _table(content, content | table) for name, table in content["tables"].items()}


def _table(content: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
    columns = []
    for heading in table["columns"]:
        column = content["columns"][heading]
        columns.append(KINDS[column.get("kind", "figure")](heading, column["stage"], column["metric"]))
    shared = content.get("open", []) if table["open"] is not content.get("open") else []
    arms = []
    for arm in table["arms"]:
        values = {"all": ALL, **content.get("common", {}), **table.get("common", {}), **arm}
        stages = dict(
            named
            for name in arm.get("stages", table["stages"])
            for named in _stages(content["stages"][name], name, values)
        )
        shown = by_heading(columns, arm.get("figures", ()))
        arms.append(Arm(arm["title"], arm["folder"], stages, shown, arm.get("row", "")))
    return Table(
        f"{content['paper']}, {table['follows']}", table["folder"], table["model"],
        {name: content["data"][name] for name in table["data"]}, columns, arms, [*shared, *table["open"]],
        table.get("picture", False),
    )  # fmt: skip


def _stages(stage: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Stage]]:
    """The stages of an entry, by name."""

    def words(text: str, each: str) -> list[str]:
        # A value may have others in it.
        for _ in range(2):
            text = Template(text).safe_substitute(values, each=each)
        return shlex.split(text)

    command = TRAIN if TRAIN in stage else EVALUATE
    for each in stage.get("each", [""]):
        yield (
            Template(stage.get("name", name)).safe_substitute(each=each),
            Stage(
                command, words(stage[command], each), words(stage.get("settings", ""), each), stage.get("start"),
                folder=stage.get("folder"),
            ),
        )  # fmt: skip
