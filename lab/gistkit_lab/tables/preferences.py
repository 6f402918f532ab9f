"""Table 3 of More Effective LLM Compressed Tokens: whose answers a judge prefers, of the systems of its Table 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gistkit_lab.tables.files import read
from gistkit_lab.tables.table import JUDGE, Arm, Column, Stage, Table, by_heading

_ABLATIONS = read("cl")["cl-2"]
_SYSTEMS = {arm.title: arm for arm in _ABLATIONS.arms}
_STAGES = ("pretrain", "finetune", "answers")
COLUMNS = [Column(name.capitalize(), "judge", name) for name in ("win", "lose", "tie")]


def _runs(system: Arm) -> dict[str, Stage]:
    """What leads to a system's answers, with its folder in the stages' names."""
    return {
        f"{system.folder}/{name}": replace(
            stage, start=None if stage.start is None else f"{system.folder}/{stage.start}"
        )
        for name, stage in system.stages.items()
        if name in _STAGES
    }


def _arm(title: str, *figures: float) -> Arm:
    first, second = (_SYSTEMS[name.lower()] if name == "Full" else _SYSTEMS[name] for name in title.split(" vs "))
    answers = [f"{system.folder}/answers" for system in (first, second)]
    judge = Stage(JUDGE, ("--questions", "{test}"), reports=answers)
    stages = {**_runs(first), **_runs(second), "judge": judge}
    return Arm(title, f"{first.folder}-vs-{second.folder}", stages, by_heading(COLUMNS, figures))


TABLES: Mapping[str, Table] = {
    "cl-3": Table(
        _ABLATIONS.follows.replace("Table 2", "Table 3"), "cl", _ABLATIONS.model, _ABLATIONS.data, COLUMNS,
        [
            _arm("Full vs wo CL", 24.8, 25.0, 49.0),
            _arm("wo CL vs wo CL + PI", 37.1, 16.7, 45.0),
            _arm("wo AE vs wo CL", 25.2, 24.0, 49.9),
        ],
        (*_ABLATIONS.open,
         "the judge is GPT-4o there: --more 'judge=--judge URL --judge-model NAME'. Its prompt is ICAE's, which is not "
         "printed; here the words are gistkit's own",
         "in which order the answers stand: in both here, so that a liking for a place cancels; "
         "--more 'judge=--one-order ...' asks once",
         "shares are of all pairs: those of which the judge gave no verdict count for none"),
    ),
}  # fmt: skip
