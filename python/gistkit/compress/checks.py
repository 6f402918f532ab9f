"""What a compressor's settings must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

LOSSES = ("ae", "lm", "compression", "qa", "kl")


def check_count(name: str, value: Any) -> None:
    """Refuses what is no whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected at least 1 token, a whole number, got {value!r}")


def check_divides(chunk: int, ratio: float) -> int:
    """Memory tokens M = chunk / ratio of a chunk, which must be a whole number."""
    check_count("chunk", chunk)
    if not isinstance(ratio, Real) or not 1 <= ratio < float("inf"):
        raise ValueError(f"ratio: expected a number >= 1, got {ratio!r}")
    tokens = int(chunk) / Fraction(float(ratio)).limit_denominator(10**6)
    if tokens.denominator != 1:
        whole = [divisor for divisor in range(1, chunk + 1) if chunk % divisor == 0]
        near = sorted(sorted(whole, key=lambda divisor: abs(divisor - ratio))[:2])
        raise ValueError(
            f"ratio: expected one that divides chunk {chunk} into whole memory tokens, such as "
            f"{' or '.join(map(str, near))}, got {ratio}"
        )
    return int(tokens)


def check_losses(losses: Iterable[str] | Mapping[str, float]) -> dict[str, float]:
    """{name: weight} of the losses asked for."""
    if losses is None or isinstance(losses, str):
        losses = [str(losses)]
    weights = dict(losses) if isinstance(losses, Mapping) else dict.fromkeys(losses, 1.0)
    if not weights or not set(weights) <= set(LOSSES):
        raise ValueError(f"losses: expected some of {', '.join(LOSSES)}, got {tuple(weights)}")
    if not all(isinstance(weight, Real) and 0 < float(weight) < float("inf") for weight in weights.values()):
        raise ValueError(f"losses: expected weights > 0, got {weights}")
    return {name: float(weights[name]) for name in LOSSES if name in weights}
