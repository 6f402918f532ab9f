"""Trained compressors beside selections that need no training: answers, intervals, tables."""

from gistkit_lab.presses.comparison import Comparison, Entry, Outcome, against_presses, entries
from gistkit_lab.presses.facts import fact_questions
from gistkit_lab.presses.report import (
    Interval,
    curves,
    interval,
    pairs_table,
    parts_table,
    presses_table,
    trained_names,
)

__all__ = [
    "Comparison",
    "Entry",
    "Interval",
    "Outcome",
    "against_presses",
    "curves",
    "entries",
    "fact_questions",
    "interval",
    "pairs_table",
    "parts_table",
    "presses_table",
    "trained_names",
]
