"""Training curves of a run's metrics, and how soon they are low."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gistkit.train.metrics import Record

Curve = list[tuple[int, float]]
# What the record of a step has beside its losses.
_OTHERS = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "held_out"}


def training_curves(records: Sequence[Record], over: int = 10) -> dict[str, Curve]:
    """By name the losses of training in nats a token: (step, mean over `over` records up to it), where so many are.

    Args:
        records: as `read_metrics` gives them; those of evaluations are left out.
        over: at least 1.
    """
    if over < 1:
        raise ValueError(f"over: expected at least 1, got {over}")
    values: dict[str, Curve] = {}
    for record in records:
        for name in record.keys() - _OTHERS:
            values.setdefault(name, []).append((record["step"], record[name]))
    curves = {}
    for name in sorted(values):
        every = values[name]
        ends = range(over, len(every) + 1)
        curves[name] = [(every[end - 1][0], fmean(value for _, value in every[end - over : end])) for end in ends]
    return {name: curve for name, curve in curves.items() if curve}


def steps_to(records: Sequence[Record], goal: float, loss: str = "ae", over: int = 10) -> int | None:
    """The first step at which a training curve is at most `goal`; None: none is (Position IDs Matter, Section 5.1)."""
    curve = training_curves(records, over).get(loss, [])
    return next((step for step, mean in curve if mean <= goal), None)
