"""The rule of each method's layout, written out from its paper's words token by token; no code of the layouts' own.

A rule takes its builder's arguments and gives the tokens in logical order, who sees whom, and the position IDs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

# A token as the papers speak of it: its kind and the chunk, window or image it belongs to.
Token = tuple[str, int]
# Whether token i, the query q, sees token j, the key k.
Sees = Callable[[int, Token, int, Token], bool]
Rule = tuple[list[Token], Sees, Iterable[float]]

RULES: dict[str, Callable[..., Rule]] = {}
# Arguments of each builder that it is compared with its rule for.
CASES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}


def rule(*cases: tuple[Any, ...] | Mapping[str, Any], **options: Sequence[Any]) -> Callable[..., Callable[..., Rule]]:
    """Makes a function the rule of the builder of its name.

    Args:
        cases: arguments, a tuple by their places or a mapping by their names.
        options: values of keyword arguments; each case is tried with all combinations.
    """

    def registered(function: Callable[..., Rule]) -> Callable[..., Rule]:
        name, chosen = function.__name__, [*itertools.product(*options.values())]
        RULES[name], CASES[name] = function, []
        for case in cases:
            given, named = ((), dict(case)) if isinstance(case, Mapping) else (case, {})
            CASES[name] += [(given, named | dict(zip(options, values, strict=True))) for values in chosen]
        return function

    return registered


def causal_sees(i: int, q: Token, j: int, k: Token) -> bool:
    """All tokens see themselves and those before them."""
    return j <= i


def counted_apart(tokens: list[Token]) -> list[int]:
    """Memory tokens are counted from 1, and the others from 0 without them."""
    counts = {True: itertools.count(1), False: itertools.count()}
    return [next(counts[kind == "memory"]) for kind, _ in tokens]


def spread(first: int, last: int, memory: int) -> list[int]:
    """Uniform IDs by Algorithm 1 of "Position IDs Matter", in exact fractions, ties to even."""
    ratio = Fraction(last - first + 1, memory)
    return [round(first + (ratio - 1) / 2 + ratio * slot) for slot in range(memory)]


def plain_positions(
    scheme: str, carrier: str, context: int, chunk: int, memory: int, task: str, text: int
) -> tuple[list[tuple[list[int], list[int]]], list[int], list[int]]:
    """Position IDs of its Tables 1-3: (context, memory) of each chunk, and the decoder's memory, and task and text."""
    ends = [(start, min(start + chunk, context)) for start in range(0, context, chunk)]
    uniform = [spread(start + 1, stop, memory) for start, stop in ends]
    if scheme in ("dpl", "cpl"):
        encoder = [([*range(stop - start)], [*range(stop - start, stop - start + memory)]) for start, stop in ends]
    else:
        encoder = [([*range(start + 1, stop + 1)], ids) for (start, stop), ids in zip(ends, uniform, strict=True)]
    first = memory * len(ends)
    # Cached keys keep the encoder's IDs.
    ids = [i for _, its in encoder for i in its] if carrier == "kv" else [*range(first)]
    if scheme in ("epl", "cpl"):
        first = 0 if task == "ae" else context
        ids = ids if carrier == "kv" else [i for its in uniform for i in its]
    return encoder, ids, [*range(first, first + 1 + text)]


def interleaved(context: int, ratio: int, text: int) -> list[Token]:
    """[BOS], then windows of context, each with its memory token, then text."""
    tokens: list[Token] = [("bos", 0)]
    for w, start in enumerate(range(0, context, ratio)):
        tokens += [("context", w)] * min(ratio, context - start) + [("memory", w)]
    return tokens + [("text", 0)] * text


@rule((5,), (1,))
def causal(length: int) -> Rule:
    return [("text", 0)] * length, causal_sees, range(length)


@rule((5, 3), (1,))
def full_context(context: int, text: int = 0) -> Rule:
    return [("bos", 0)] + [("context", 0)] * context + [("text", 0)] * text, causal_sees, range(1 + context + text)


@rule((3,), (1,))
def no_context(text: int) -> Rule:
    return [("bos", 0)] + [("text", 0)] * text, causal_sees, range(1 + text)


@rule((12, 4, 2), (11, 4, 3), (3, 8, 5), (5, 1, 1), (9, 4, 6), positions=("dpl", "upl", "cpl", "epl"))
def icae_encoder(context: int, chunk: int, memory: int, positions: str = "epl") -> Rule:
    tokens: list[Token] = []
    wanted: list[int] = []
    for c, (its, slots) in enumerate(plain_positions(positions, "kv", context, chunk, memory, "ae", 0)[0]):
        tokens += [("context", c)] * len(its) + [("memory", c)] * memory
        wanted += its + slots
    # Each [chunk; memory] is a sequence of its own under a causal mask.
    return tokens, lambda i, q, j, k: q[1] == k[1] and j <= i, wanted


@rule(
    *({"task": task, "question": question, "text": text}
      for task, question, text in (("ae", 0, None), ("lm", 0, 5), ("qa", 3, 2), ("lm", 0, 0))),
    context=(11,), chunk=(4,), memory=(3,), positions=("dpl", "upl", "cpl", "epl"), carrier=("embedding", "kv"),
)  # fmt: skip
def decoder(
    context: int,
    chunk: int,
    memory: int,
    task: str = "ae",
    carrier: str = "embedding",
    positions: str = "epl",
    text: int | None = None,
    question: int = 0,
) -> Rule:
    count = context if text is None else question + text
    _, ids, rest = plain_positions(positions, carrier, context, chunk, memory, task, count)
    tokens: list[Token] = [("memory", 0)] * len(ids) + [("task", 0)] + [("text", 0)] * count
    return tokens, causal_sees, ids + rest


@rule((18, 4, 3), (18, 4.5, 3), (3, 8, 2), {"context": 18, "memory": 2, "text": 3}, separate_positions=(False, True))
def gist(
    context: int,
    ratio: float | None = None,
    text: int = 0,
    memory: int | None = None,
    separate_positions: bool = False,
) -> Rule:
    count = math.ceil(context / ratio) if ratio else memory or 0
    tokens: list[Token] = [("bos", 0)] + [("context", 0)] * context + [("memory", 0)] * count + [("text", 0)] * text

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        if j > i:
            return False
        return k[0] == "bos" or q[0] != "text" or k[0] != "context"

    return tokens, sees, counted_apart(tokens) if separate_positions else range(len(tokens))


FLAGS = ("memory_sees_memory", "memory_sees_itself", "memory_sees_bos", "context_sees_memory", "separate_positions")


@rule(
    *({"context": context, "ratio": 3, "text": 4, "windows": windows}
      for context, windows in ((12, 1), (13, 2), (13, None), (4, 5), (12, None))),
    {"context": 3, "ratio": 8, "text": 2},
    **dict.fromkeys(FLAGS, (False, True)),
)  # fmt: skip
def gistpool(
    context: int,
    ratio: int,
    text: int,
    windows: int | None = 5,
    memory_sees_memory: bool = False,
    memory_sees_itself: bool = True,
    memory_sees_bos: bool = True,
    context_sees_memory: bool = False,
    separate_positions: bool = False,
) -> Rule:
    tokens = interleaved(context, ratio, text)

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        if j > i:
            return False
        match q[0], k[0]:
            case "bos", _:
                return True
            case "memory", "bos":
                return memory_sees_bos
            case "memory", "context":
                return windows is None or k[1] > q[1] - windows
            case "memory", "memory":
                return memory_sees_itself if i == j else memory_sees_memory
            case "context", "memory":
                return context_sees_memory
            case "text", "context":
                return False
        return True

    return tokens, sees, counted_apart(tokens) if separate_positions else range(len(tokens))


@rule((6, 2, 3), (7, 3, 3), (5, 5, 3), (4, 1, 3), (3, 8, 2))
def avgpool(context: int, ratio: int, text: int) -> Rule:
    tokens = interleaved(context, ratio, text)
    ids: list[float] = [0]
    for start in range(0, context, ratio):
        its = list(range(start + 1, min(start + ratio, context) + 1))
        ids += [*its, sum(its) / len(its)]

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        match q[0], k[0]:
            case "memory", _:
                return k == ("context", q[1])
            case "context", "memory":
                return False
            case "text", "context":
                return False
        return j <= i

    return tokens, sees, [*ids, *range(context + 1, context + 1 + text)]


@rule(
    *({"context": context, "ratio": ratio, "text": 3, "segment": segment}
      for context, ratio, segment in ((12, 2, 4), (13, 3, 7), (5, 4, 1), (3, 9, 20)))
)  # fmt: skip
def beacon(context: int, ratio: int, text: int, segment: int = 2048) -> Rule:
    units = max(1, segment // ratio)
    tokens = [(kind, w // units) for kind, w in interleaved(context, ratio, text)]

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        return j <= i and (k[0] != "context" or (q[0] != "text" and k[1] == q[1]))

    return tokens, sees, range(len(tokens))


@rule(
    ([7], [3], 4),
    {"vision": [7], "memory": [3], "text": 4, "before": 3},
    {"vision": [7] * 3, "memory": [3] * 3, "text": 4, "before": 2},
    {"vision": [7, 1, 5], "memory": [3, 2, 4], "text": 4, "before": 2, "between": [1, 2], "gap": 2},
    {"vision": [4, 6], "memory": [2, 2], "text": 4, "between": [3], "gap": 1},
    {"vision": [4, 6], "memory": [2, 9], "text": 4, "before": 1, "between": [3], "bidirectional": True},
    positions=("dpl", "upl", "cpl", "epl"),
    text_sees_before=(False, True),
)
def voco(
    vision: list[int],
    memory: list[int],
    text: int,
    before: int = 0,
    between: list[int] | None = None,
    gap: int = 0,
    positions: str = "epl",
    text_sees_before: bool = True,
    bidirectional: bool = False,
) -> Rule:
    after = [*([0] * (len(vision) - 1) if between is None else between), text]
    tokens: list[Token] = [("text", -1)] * before
    ids = list(range(before))
    # UPL counts all tokens as DPL does, and CPL none of the memory tokens, as EPL.
    consistent = positions in ("cpl", "epl")
    at = max(before, 1) if consistent else before
    for image, (seen, gists, rest) in enumerate(zip(vision, memory, after, strict=True)):
        tokens += [("context", image)] * (seen + gap) + [("memory", image)] * gists + [("text", image)] * rest
        end = at + seen + gap
        ids += range(at, end)
        ids += spread(at, at + seen - 1, gists) if positions in ("upl", "epl") else range(end, end + gists)
        at = end if consistent else end + gists
        ids += range(at, at + rest)
        at += rest
    if positions == "dpl":
        assert ids == list(range(len(tokens)))

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        if bidirectional and q == k and q[0] == "context":
            return True
        if j > i:
            return False
        if k[0] == "context":
            return q[0] != "text" and q[1] == k[1]
        return text_sees_before or k[0] == "memory" or q[0] != "text" or q[1] == k[1]

    return tokens, sees, ids


@rule(
    *((np.isin(np.arange(23), (2, 3, 9, 14, 20, 22)), tau) for tau in (1, 4, 100)),
    *({"selected": np.isin(np.arange(23), (0, 2, 3, 9, 14, 20, 22)), "tau": tau, "segment": segment, "bos": bos}
      for tau, segment in ((4, 4), (6, 2), (6, 3), (40, 8)) for bos in (False, True)),
)  # fmt: skip
def dodo(selected: Any, tau: int, segment: int = 1, bos: bool = False) -> Rule:
    tokens: list[Token] = [("memory" if nugget else "context", i // segment) for i, nugget in enumerate(selected)]
    if bos:
        tokens[0] = ("bos", 0)

    # Token t sees the nuggets of w_1..t-tau and all of the last tau tokens, itself included. What is uncompressed
    # begins at the same token for a whole segment.
    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        return j <= i and (k[0] != "context" or j >= i // segment * segment - (tau - segment))

    return tokens, sees, range(len(tokens))


@rule((12, 6, 3), (13, 6, 3), (8, 4, 4), (2, 8, 6), (5, 1, 1))
def sac(context: int, chunk: int, ratio: int) -> Rule:
    tokens: list[Token] = []
    for c, start in enumerate(range(0, context, chunk)):
        size = min(chunk, context - start)
        anchors = [place for place in range(size) if place % ratio == (ratio - 1) // 2] or [0]
        tokens += [("memory" if place in anchors else "context", c) for place in range(size)]
    return tokens, lambda i, q, j, k: q[1] == k[1], range(1, context + 1)
