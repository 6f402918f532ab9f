"""Tables of a comparison with presses: every figure with its interval, and differences over the same questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gistkit.compress.scores import SCORES
from gistkit.evaluate.metrics import perplexity
from gistkit.evaluate.report import format_table
from gistkit_lab.presses.comparison import FULL, NEWEST, NONE, OLDEST, PLAIN, POOLED, Comparison, Outcome, shown

# Shortest and longest contexts of a column, in tokens.
LENGTHS = ((0, 128), (129, 512), (513, 1024), (1025, 2048), (2049, 1 << 31))

# Of the bootstrap.
DRAWS = 4000


class Interval(NamedTuple):
    """A mean and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float], groups: Sequence[int]) -> Interval:
    """The mean of values, with the interval of the percentile bootstrap over groups.

    Questions about one context are right or wrong together, as the memory is one: contexts are drawn, not questions.
    The interval of a difference is that of the single differences, so pass these.

    Args:
        values: one for each question.
        groups: the number of each question's context.

    Raises:
        ValueError: if there is no value, or not one group for each.
    """
    array = np.asarray(values, dtype=np.float64)
    ids = np.asarray(groups)
    if not len(array) or len(ids) != len(array):
        raise ValueError(f"values: expected at least one, with a group each, got {len(array)} and {len(ids)}")
    _, place = np.unique(ids, return_inverse=True)
    sums, sizes = np.bincount(place, array), np.bincount(place)
    drawn = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), DRAWS)
    low, high = np.percentile((drawn @ sums) / (drawn @ sizes), (2.5, 97.5))
    return Interval(float(sums.sum() / len(array)), float(low), float(high))


def percent(comparison: Comparison, values: Sequence[float]) -> Interval:
    """The mean of figures of all questions in percent, drawn by contexts."""
    return interval([100 * value for value in values], comparison.contexts)


def presses_table(comparison: Comparison) -> str:
    """A table for each reader: its full context, no context and trained compressor, then each ratio's memories."""
    return "\n\n".join(_reader_table(comparison, reader, rows) for reader, rows in _readers(comparison))


def _readers(comparison: Comparison) -> Iterator[tuple[str, list[Outcome]]]:
    """Readers, plain last, each with its outcomes: those of no ratio, then by ratio, then by exact answers."""
    names = sorted({one.entry.reader for one in comparison.outcomes}, key=lambda name: (name == PLAIN, name))
    for name in names:
        rows = [one for one in comparison.outcomes if one.entry.reader == name]
        yield name, sorted(rows, key=_place)


def _place(one: Outcome) -> tuple[bool, float, bool, float]:
    entry = one.entry
    return entry.memory not in (FULL, NONE), entry.ratio or 0, entry.aware, -sum(one.exact)


def _reader_table(comparison: Comparison, reader: str, outcomes: Sequence[Outcome]) -> str:
    title = "the model as it is" if reader == PLAIN else f"with the adapter of {reader}"
    heads = ["tokens kept", "exact, %", "within, %", "F1, %", "ppl of the answer", "ppl of what follows"]
    full = next((one for one in outcomes if one.entry.memory == FULL), None)
    rows = [[title, *heads, *(["exact, less the full context's"] if full else [])]]
    for one in outcomes:
        answer, follows = sum(one.nats) / sum(one.answer_tokens), sum(one.following_tokens)
        cells = [shown(one.entry), f"{_mean_tokens(comparison, one):.0f}"]
        cells += [_cell(percent(comparison, values)) for values in (one.exact, one.within)]
        cells += [f"{100 * sum(one.f1) / len(one.f1):.0f}", f"{perplexity(answer):.2f}"]
        cells.append(f"{perplexity(sum(one.following_nats) / follows):.2f}" if follows else "-")
        if full:
            cells.append("-" if one is full else _signed(percent(comparison, _less(one.exact, full.exact))))
        rows.append(cells)
    return format_table(rows)


def pairs_table(comparison: Comparison) -> str:
    """Each trained compressor beside what keeps about as much under the same reader: differences in exact answers.

    Empty without trained compressors.
    """
    rows = [["a trained compressor, less", "exact, %", "right where the other is wrong", "the reverse"]]
    for _, outcomes in _readers(comparison):
        for one in outcomes:
            if not _trained(one) or one.entry.ratio is None:
                continue
            for other in outcomes:
                if other.entry.ratio == one.entry.ratio and other is not one:
                    better, worse = (
                        sum(a > b for a, b in zip(*pair, strict=True))
                        for pair in ((one.exact, other.exact), (other.exact, one.exact))
                    )
                    less = _signed(percent(comparison, _less(one.exact, other.exact)))
                    name = f"{one.entry.memory}, less {shown(other.entry)}"
                    rows.append([name, less, str(better), str(worse)])
    return format_table(rows) if len(rows) > 1 else ""


def parts_table(comparison: Comparison, rows: Callable[[Outcome], bool] = lambda outcome: True) -> str:
    """Exact answers in percent by set of questions and by length of the context, of the chosen outcomes."""
    sets = list(dict.fromkeys(comparison.sets))
    parts: dict[str, list[int]] = {
        name: [index for index, own in enumerate(comparison.sets) if own == name] for name in sets
    }
    for low, high in LENGTHS:
        inside = [index for index, owner in enumerate(comparison.contexts) if low <= comparison.lengths[owner] <= high]
        name = f"to {high} tokens" if high < 1 << 31 else f"over {low - 1}"
        parts |= {name: inside} if inside else {}
    table = [["exact, %", *(f"{name} ({len(inside)})" for name, inside in parts.items())]]
    several = len({one.entry.reader for one in comparison.outcomes} - {PLAIN}) > 1
    for reader, outcomes in _readers(comparison):
        adapter = f"adapter of {reader}" if several else "adapter"
        for one in filter(rows, outcomes):
            name = shown(one.entry) if reader == PLAIN else f"{adapter} + {shown(one.entry)}"
            means = (100 * sum(one.exact[index] for index in inside) / len(inside) for inside in parts.values())
            table.append([name, *(f"{mean:.0f}" for mean in means)])
    return format_table(table)


Curves = Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]]


def curves(comparison: Comparison) -> Curves:
    """For `viz.draw_presses`: by reader and memory (share of tokens kept, exact %, low, high), all bytes last.

    No and full context are at both ends of a line each.
    """
    total = sum(comparison.lengths[owner] + 1 for owner in comparison.contexts) / len(comparison.contexts)
    found: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    for reader, outcomes in _readers(comparison):
        title = "the model as it is" if reader == PLAIN else f"with the adapter of {reader}"
        for one in outcomes:
            name = shown(replace(one.entry, ratio=None))
            share = _mean_tokens(comparison, one) / total
            point = (share, *percent(comparison, one.exact))
            found.setdefault(title, {}).setdefault(name, []).append(point)
    return {title: {name: sorted(points) for name, points in lines.items()} for title, lines in found.items()}


def _mean_tokens(comparison: Comparison, one: Outcome) -> float:
    return sum(one.tokens[owner] for owner in comparison.contexts) / len(comparison.contexts)


def _trained(one: Outcome) -> bool:
    return one.entry.memory not in (FULL, NONE, NEWEST, OLDEST, POOLED, *SCORES)


def trained_names(comparison: Comparison) -> list[str]:
    """The trained compressors of a comparison."""
    return list(dict.fromkeys(one.entry.memory for one in comparison.outcomes if _trained(one)))


def _less(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [this - that for this, that in zip(these, those, strict=True)]


def _cell(found: Interval) -> str:
    return f"{found.mean:.0f} ({found.low:.0f}-{found.high:.0f})"


def _signed(found: Interval) -> str:
    return f"{found.mean:+.0f} ({found.low:+.0f} to {found.high:+.0f})"
