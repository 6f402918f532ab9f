"""Metrics: the figures of a training run, as JSON lines."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

Record = dict[str, Any]
METRICS = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a metrics file, in order.

    A record of a step holds "step" (updates done), every loss by name (nats a token), "loss", "lr", "grad_norm" (before
    clipping), "tokens_per_second" and "seconds" (training so far); one of an evaluation holds "step" and "held_out",
    its losses. A last line that was cut short is left out, with a warning.

    Raises:
        ValueError: if another line is no record, with its number.
    """
    return _read_lines(Path(path))


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


def _read_lines(path: Path) -> list[Record]:
    lines = path.read_bytes().split(b"\n")
    found: list[Record] = []
    for number, line in enumerate(lines, start=1):
        # What follows the last newline: nothing, or what a killed process had written of a line.
        last = number == len(lines)
        if last and not line:
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("no record with a step")
        except ValueError as error:
            if not last:
                raise ValueError(
                    f"{path}, line {number}: expected a record of metrics as JSON, got {line[:40]!r} ({error})"
                ) from None
            warnings.warn(f"{path}, line {number}: left out, since it was cut short", stacklevel=3)
        else:
            found.append(record)
    return found
