"""The results of the study `greedy`: a table beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gistkit.evaluate import perplexity
from gistkit.evaluate.report import format_table
from gistkit_lab.studies.greedy.study import SwapSearch

# Dodo, Section 7.1 and Appendix A: Llama-2-7B at 10x, 1000 documents of WikiText-103's test set. There the last token
# may be swapped too.
PAPER = {"overlap": 0.753, "perplexity_before": 7.74, "perplexity_after": 7.13, "texts": 1000}
CAPTION = (
    "Stayed: share of the compressor's nuggets that no swap replaced, mean over texts; in brackets without the last "
    "token,\nwhich always stays. Perplexity of the tokens asked in all texts, behind its own nuggets and those found."
)


@dataclass
class Run:
    """What was found for one compressor.

    Args:
        title, settings: of the compressor.
        texts: one each.
        training: how it was trained, where that is known.
    """

    title: str
    settings: dict[str, Any]
    texts: list[SwapSearch]
    training: dict[str, Any] = field(default_factory=dict)


def summary(results: Sequence[SwapSearch]) -> dict[str, float]:
    """The figures of `PAPER`, the swaps tried, and overlap_but_last where some context has more than one nugget."""
    figures = {
        "overlap": fmean(result.overlap for result in results),
        "perplexity_before": perplexity(fmean(result.loss_before for result in results)),
        "perplexity_after": perplexity(fmean(result.loss_after for result in results)),
        "texts": len(results),
        "tried": sum(result.tried for result in results),
    }
    but_last = [result.overlap_but_last for result in results if result.overlap_but_last is not None]
    return figures | ({"overlap_but_last": fmean(but_last)} if but_last else {})


def table_rows(runs: Mapping[str, Sequence[SwapSearch]]) -> list[list[str]]:
    """Header, a row a compressor by its title, and the paper's."""
    header = ["", "stayed", "perplexity", "of the best found", "lower by", "texts"]
    rows = [_row(title, summary(results)) for title, results in runs.items()]
    return [header, *rows, _row("paper: Dodo 10x", PAPER)]


def format_results(runs: Sequence[Run]) -> str:
    """The table and what its cells are."""
    return f"{format_table(table_rows({run.title: run.texts for run in runs}))}\n\n{CAPTION}"


def _row(name: str, figures: Mapping[str, float]) -> list[str]:
    stayed = f"{figures['overlap']:.1%}"
    if "overlap_but_last" in figures:
        stayed += f" ({figures['overlap_but_last']:.1%})"
    before, after = figures["perplexity_before"], figures["perplexity_after"]
    return [name, stayed, f"{before:.2f}", f"{after:.2f}", f"{1 - after / before:.1%}", f"{figures['texts']:.0f}"]
