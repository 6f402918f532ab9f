"""Training curves: Figures 4 and 5 of Position IDs Matter, and Figure 2 of More Effective LLM Compressed Tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gistkit_lab.tables import epl
from gistkit_lab.tables.files import read
from gistkit_lab.tables.table import CURVES, Arm, StepsTo, Table

COLUMN = StepsTo("steps to AE .01", "pretrain", "ae")
OPEN = (
    "over how many steps the loss is a mean: ten; and the figures are in pictures alone, but for what the text says",
)
# Section 5.1, in thousands of steps there.
_STEPS = {("8b", "500x(DPL)"): 9700.0, ("8b", "500x(EPL)"): 1000.0}


def _pretraining(arm: Arm, steps: float | None = None) -> Arm:
    """The first stage of an arm of another table."""
    published = {} if steps is None else {COLUMN.heading: steps}
    return Arm(arm.title, arm.folder, {COLUMN.stage: arm.stages[COLUMN.stage]}, published)


def _table(follows: str, like: Table, titles: Sequence[str], steps: Mapping[str, float]) -> Table:
    arms = [_pretraining(arm, steps.get(arm.title)) for arm in like.choose(titles).arms]
    return Table(follows, like.paper, like.model, {"text": like.data["text"]}, [COLUMN], arms, OPEN, picture=CURVES)


_EPL = {"1b": "epl-4", "3b": "epl-9-3b", "8b": "epl-9-8b"}
_TITLES = [f"{method}({layout})" for method in epl.METHODS for layout in ("DPL", "EPL")]
TABLES: Mapping[str, Table] = {
    **{
        f"epl-curves-{model}": _table(
            f"{epl.PAPER}, Section 5.1 and Figures 4 and 5",
            epl.TABLES[name],
            _TITLES,
            {title: steps for (at, title), steps in _STEPS.items() if at == model},
        )
        for model, name in _EPL.items()
    },
    "cl-figure-2": _table(
        "More Effective LLM Compressed Tokens, Figure 2: with and without PI",
        read("cl")["cl-2"],
        ["wo CL", "wo CL + PI"],
        {},
    ),
}
