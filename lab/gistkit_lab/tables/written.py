"""Table 12 of Getting to the Gist of Gisting: texts that a language model has shortened in words."""

from __future__ import annotations

from collections.abc import Mapping

from gistkit_lab.tables.gistpool import PAPER, SETS
from gistkit_lab.tables.table import ALL, EVALUATE, Arm, Column, Stage, Table, WrongAnswers

# Wrong answers in percent, in the order of SETS.
_WRONG = {
    2: (43.4, 9.1, 33.7, 20.8, 16.1, 51.5),
    5: (52.5, 17.7, 36.3, 22.7, 26.3, 57.8),
    10: (64.2, 31.5, 46.1, 28.7, 40.6, 61.2),
    25: (None, None, None, None, None, 67.8),
    50: (None, None, None, None, None, 80.0),
}


def _arm(ratio: int) -> Arm:
    figures = {name: wrong for name, wrong in zip(SETS, _WRONG[ratio], strict=True) if wrong is not None}
    stages = {
        f"answers-{name}": Stage(
            EVALUATE, ("--questions", f"{{{name}-test}}", "--examples", ALL, "--written-ratio", str(ratio))
        )
        for name in figures
    }
    return Arm(f"{ratio}x", f"written-{ratio}x", stages, {f"{name} wrong": wrong for name, wrong in figures.items()})


def _columns(name: str) -> tuple[Column, Column]:
    stage = f"answers-{name}"
    return WrongAnswers(f"{name} wrong", stage, "qa_judge"), Column(f"{name} ratio", stage, "written_ratio")


TABLES: Mapping[str, Table] = {
    "gistpool-12": Table(
        f"{PAPER}, Table 12 and Figure 5", "gistpool", "Gemma 2 2B, whose tokens are counted",
        {f"{name}-test": f"{name}'s evaluation split" for name in SETS},
        [column for name in SETS for column in _columns(name)],
        [_arm(ratio) for ratio in _WRONG],
        (
            "who writes and answers is Gemini there, and who judges Gemini 1.5 Flash: --more 'answers=--writer URL "
            "--writer-model NAME --judge URL --judge-model NAME'",
            "its prompts are not in the stored text; the words here are gistkit's own, and ask for words of a text",
            "ratios that were reached are in its Figure 5 alone, which the text describes as about half of what was "
            "asked for; --cut in the same options cuts what was written to as many tokens as a compressor has",
        ),
    ),
}  # fmt: skip
