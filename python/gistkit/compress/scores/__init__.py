"""Scores of keys for `Select`; the keys with the highest scores are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gistkit.compress.scores.expected_attention import ExpectedAttention
from gistkit.compress.scores.keys import Even, KeyDiff, KeyNorm, Random, Streaming
from gistkit.compress.scores.kvzip import KVzip
from gistkit.compress.scores.score import Heads, Score
from gistkit.compress.scores.snapkv import SnapKV

SCORES: dict[str, type[Score]] = {
    score.name: score for score in (KVzip, ExpectedAttention, SnapKV, KeyDiff, KeyNorm, Streaming, Even, Random)
}


def score_of(by: Any) -> Score:
    """The score of a name of `SCORES`, of a mapping with its "name" and arguments, or of a `Score` itself.

    Raises:
        ValueError: for another name or arguments that it does not take.
    """
    if isinstance(by, Score):
        return by
    arguments = {**by} if isinstance(by, Mapping) else {"name": by}
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in SCORES:
        raise ValueError(f"by: expected one of {', '.join(SCORES)}, or a Score, got {name!r}")
    try:
        return SCORES[name](**arguments)
    except TypeError as error:
        raise ValueError(f"by: expected arguments of {name}, got {arguments}: {error}") from error


def description(score: Score) -> Any:
    """What `score_of` makes the score of again, as JSON; of a class that is not in `SCORES`, what identifies it."""
    arguments = {each.name: getattr(score, each.name) for each in fields(score)}
    plain = all(arguments[each.name] == each.default for each in fields(score))
    return score.name if plain else {"name": score.name, **arguments}


__all__ = [
    "SCORES", "Even", "ExpectedAttention", "Heads", "KVzip", "KeyDiff", "KeyNorm", "Random", "Score", "SnapKV",
    "Streaming", "description", "score_of",
]  # fmt: skip
