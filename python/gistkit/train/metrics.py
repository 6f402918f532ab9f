"""Metrics: the figures of a training run, as JSON lines."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
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
    lines = Path(path).read_bytes().split(b"\n")
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
            warnings.warn(f"{path}, line {number}: left out, since it was cut short", stacklevel=2)
        else:
            found.append(record)
    return found
