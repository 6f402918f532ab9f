"""bleu_by_length: how the reconstruction of a context depends on its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gistkit.compress import Compressor
from gistkit.evaluate.data import Example, Tokens, prepare
from gistkit.evaluate.evaluation import evaluate
from gistkit.evaluate.runner import reconstruction_bleu


@dataclass(frozen=True)
class LengthBleu:
    """Contexts of about one length: that length in tokens, their number, and their corpus BLEU-4, 0..100."""

    length: int
    contexts: int
    bleu4: float


def bleu_by_length(
    compressor: Compressor,
    contexts: Sequence[Tokens],
    lengths: Sequence[int],
    *,
    within: int = 5,
    tokenizer: Any | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> list[LengthBleu]:
    """BLEU-4 of greedy reconstructions in groups of contexts of about the same length: Dodo, Figure 4.

    BLEU-4 is that of `compare` for "ae", taken over each group.

    Args:
        compressor: a Compressor, or a baseline.
        contexts: token ids, or text with a tokenizer; those outside all groups are left out.
        lengths: the groups' lengths in tokens, in any order; groups must not overlap.
        within: a group has the contexts whose lengths differ from its length by at most so many tokens.
        tokenizer, batch_size, progress: as in `compare`.

    Returns:
        One for each of `lengths`, in their order.

    Raises:
        ValueError: if groups overlap or one has no context, or as in `compare`.
    """
    if within < 0:
        raise ValueError(f"within: expected at least 0 tokens, got {within}")
    ordered = sorted(lengths)
    if not ordered or ordered[0] < 1:
        raise ValueError(f"lengths: expected at least one length of at least 1, got {list(lengths)}")
    for low, high in pairwise(ordered):
        if high - low <= 2 * within:
            raise ValueError(f"lengths: expected them more than 2 * {within} tokens apart, got {low} and {high}")
    if isinstance(contexts, str) or not len(contexts):
        raise ValueError(f"contexts: expected at least one in a sequence, got {contexts!r:.60}")
    groups: dict[int, list[int]] = {length: [] for length in lengths}
    examples: list[Example] = []
    for row in prepare([Example(context) for context in contexts], tokenizer, ("ae",)):
        for length, members in groups.items():
            if abs(len(row.context) - length) <= within:
                members.append(len(examples))
                examples.append(Example(row.context))
    for length, members in groups.items():
        if not members:
            raise ValueError(f"lengths: expected contexts of {length} ± {within} tokens, got none")
    report = evaluate(
        compressor, examples, tokenizer=tokenizer, tasks=("ae",), batch_size=batch_size, progress=progress
    )
    results = report.rows[0].examples
    return [
        LengthBleu(length, len(members), reconstruction_bleu([results[index] for index in members], tokenizer))
        for length, members in groups.items()
    ]
