"""The results of the study `pooling`: a table beside what the paper says, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

from gistkit.evaluate.report import format_table
from gistkit_lab.studies.pooling.layer import CONTEXTS, MASKS, Recipe, Setting
from gistkit_lab.studies.pooling.runs import Run, chance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What GistPool, Section 6.1, says of Table 11, by inputs, mask and context: 50,000 steps of 64 sequences, the best of
# 3 seeds and several learning rates. Its vocabulary is Gemma2's.
PAPER = {
    ("sphere", "pool", "fixed"): "near perfect",
    ("sphere", "pool", "variable"): "near perfect",
    ("sphere", "pool", "at-zero"): "near perfect",
    ("sphere", "standard", "fixed"): "much worse",
    ("sphere", "standard", "variable"): "much reduced",
    ("sphere", "standard", "at-zero"): "better, short of pool",
    ("vocabulary", "pool", "fixed"): "near perfect",
    ("vocabulary", "pool", "variable"): "near perfect",
    ("vocabulary", "pool", "at-zero"): "near perfect",
    ("vocabulary", "standard", "fixed"): "as pool",
    ("vocabulary", "standard", "variable"): "much reduced",
    ("vocabulary", "standard", "at-zero"): "better, short of pool",
}
CAPTION = (
    "Share of predicted vectors whose nearest window mean is their own: the best of the runs over seeds and learning "
    "rates (their median).\nChance: of a guess, fixed / variable length. Words: what the paper says of its own runs."
)
Group = tuple[str, int, int, int, int]


def group_of(setting: Setting) -> Group:
    """What the row of a setting is about: inputs, heads, key heads, ratio and length."""
    return setting.inputs, setting.heads, setting.kv_heads, setting.ratio, setting.length


def table_rows(runs: Sequence[Run], recipe: Recipe) -> list[list[str]]:
    """Header and one row a group, after those of the paper for the inputs that it has."""
    columns = list(product(MASKS, CONTEXTS))
    names = {"fixed": "fixed", "variable": "variable", "at-zero": "gists at 0"}
    rows = [["inputs", "heads", "ratio", "length", *(f"{mask}, {names[context]}" for mask, context in columns)]]
    rows[0] += ["chance", "runs"]
    for inputs in dict.fromkeys(run.setting.inputs for run in runs):
        if (inputs, *columns[0]) in PAPER:
            paper_cells = [PAPER[inputs, *column] for column in columns]
            rows.append([f"paper: {inputs}", "", "", "", *paper_cells, "", ""])
    for group in dict.fromkeys(group_of(run.setting) for run in runs):
        group_runs = [run for run in runs if group_of(run.setting) == group]
        inputs, heads, keys, ratio, length = group
        shares = [
            [run.share for run in group_runs if (run.setting.mask, run.setting.context) == column] for column in columns
        ]
        guesses = [
            chance(recipe, Setting(context=context, ratio=ratio, length=length)) for context in ("fixed", "variable")
        ]
        counts = sorted({len(cell) for cell in shares if cell})
        rows.append(
            [
                *(inputs, f"{heads}/{keys}", str(ratio), str(length)),
                *map(_cell, shares),
                " / ".join(f"{context:.2f}" for context in guesses),
                "-".join(map(str, dict.fromkeys([counts[0], counts[-1]]))),
            ]
        )
    return rows


def _cell(shares: Sequence[float]) -> str:
    if not shares:
        return "-"
    return f"{max(shares):.2f}" + (f" ({median(shares):.2f})" if len(shares) > 1 else "")


def format_results(runs: Sequence[Run], recipe: Recipe) -> str:
    """The table and what its cells are."""
    return f"{format_table(table_rows(runs, recipe))}\n\n{CAPTION}"


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Attention of the gists, a figure for each kind of inputs that has any: its first group's best runs."""
    from gistkit_lab.viz.pooling import draw_gist_attention

    pictures = {}
    for inputs in dict.fromkeys(run.setting.inputs for run in runs if run.attention):
        input_runs = [run for run in runs if run.setting.inputs == inputs and run.attention]
        group = group_of(input_runs[0].setting)
        best: dict[tuple[str, str], Run] = {}
        for run in sorted((run for run in input_runs if group_of(run.setting) == group), key=lambda run: run.share):
            best[run.setting.context, run.setting.mask] = run
        # In the order of the study, whichever came first.
        cells = {cell: best[cell] for cell in product(CONTEXTS, MASKS) if cell in best}
        _, heads, keys, ratio, length = group
        pictures[f"attention-{inputs}"] = draw_gist_attention(
            {cell: (run.attention, run.share) for cell, run in cells.items()},
            ratio,
            title=f"{inputs}, {ratio}x, {length} embeddings, heads {heads}/{keys}",
        )
    return pictures
