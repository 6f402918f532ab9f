"""Roles of tokens, and relations: which tokens of a key role are visible to a query."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gistkit.common.checks import at_least, one_of


class Role(IntEnum):
    """The role of a token. The numbers give the grouped physical order."""

    BOS = 0
    CONTEXT = 1
    MEMORY = 2
    TASK = 3
    TEXT = 4
    PAD = 5


# What the planner computes with: (segments, skip, reach), each a bound or None. A key is seen when its segment is the
# query's or one of the `segments - 1` before, its ordinal at least `skip` and less than `reach` before the query's.
# "size" stands for the relation's own.
_BOUNDS: dict[str, tuple[int | str | None, int | str | None, int | str | None]] = {
    "all": (None, None, None),
    "causal": (None, 0, None),
    "segment": (1, None, None),
    "segment_causal": (1, 0, None),
    "self": (None, 0, 1),
    "windows": ("size", None, None),
    "windows_causal": ("size", 0, None),
    "recent": (None, 0, "size"),
    "older": (None, "size", None),
}


@dataclass(frozen=True)
class Relation:
    """Which tokens of a key role a query sees, in its own document. Use this module's values and functions.

    Args:
        kind: one of "all", "causal", "segment", "segment_causal", "self", "windows", "windows_causal", "recent",
            "older".
        size: number of windows or tokens, at least 1, where the kind has one; otherwise 0.
    """

    kind: str
    size: int = 0

    def __post_init__(self) -> None:
        one_of("Relation", "kind", self.kind, tuple(_BOUNDS))
        if "size" in _BOUNDS[self.kind]:
            at_least("Relation", "size", self.size, 1)
        elif self.size != 0:
            raise ValueError(f"Relation: expected no size for kind {self.kind!r}, got {self.size!r}")

    @property
    def bounds(self) -> tuple[int | None, int | None, int | None]:
        """(segments, skip, reach) for the planner; None is unbounded."""
        segments, skip, reach = (self.size if bound == "size" else bound for bound in _BOUNDS[self.kind])
        return segments, skip, reach  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"{self.kind}({self.size})" if self.size else self.kind


ALL = Relation("all")
CAUSAL = Relation("causal")
SEGMENT = Relation("segment")
SEGMENT_CAUSAL = Relation("segment_causal")
SELF = Relation("self")


def windows(count: int) -> Relation:
    """The query's own segment and the `count - 1` before it. `count`: int, at least 1."""
    return Relation("windows", at_least("windows", "count", count, 1))


def windows_causal(count: int) -> Relation:
    """The part of `windows(count)` that is not later than the query. `count`: int, at least 1."""
    return Relation("windows_causal", at_least("windows_causal", "count", count, 1))


def recent(tokens: int) -> Relation:
    """Among the document's last `tokens` tokens, of whatever role, the query included. `tokens`: int, at least 1."""
    return Relation("recent", at_least("recent", "tokens", tokens, 1))


def older(tokens: int) -> Relation:
    """Tokens at least `tokens` before the query: `CAUSAL` without `recent`. `tokens`: int, at least 1."""
    return Relation("older", at_least("older", "tokens", tokens, 1))
