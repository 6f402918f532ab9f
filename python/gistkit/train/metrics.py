"""Metrics: the figures of a training run, as JSON lines."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gistkit.common.files import Lines, write_bytes

Record = dict[str, Any]


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a metrics file, in order.

    A record of a step holds "step" (updates done), every loss by name (nats a token), "loss", "lr", "grad_norm" (before
    clipping), "tokens_per_second" and "seconds" (training so far); one of an evaluation holds "step" and "held_out",
    its losses. A last line that was cut short is left out, with a warning.

    Raises:
        ValueError: if another line is no record, with its number.
    """
    return [record for _, record in _read_lines(Path(path))]


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


def _read_lines(path: Path) -> list[tuple[bytes, Record]]:
    """The lines of a metrics file, each with its record."""
    lines = path.read_bytes().split(b"\n")
    found: list[tuple[bytes, Record]] = []
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
            found.append((line, record))
    return found


class Metrics:
    """Writes records, each at once, to `folder`/metrics.jsonl.

    Args:
        folder: exists.
        step: an existing file keeps its records up to this number of updates.
        evaluates: whether the evaluation after so many is made again, so that its record goes too.
        write: False in all processes but one, which then write nothing.
    """

    def __init__(self, folder: Path, *, step: int = 0, evaluates: bool = False, write: bool = True) -> None:
        self._file = None
        if not write:
            return
        path = folder / "metrics.jsonl"
        if path.exists():
            kept = [
                line
                for line, record in _read_lines(path)
                if step and record["step"] <= step - (evaluates and "held_out" in record)
            ]
            write_bytes(path, b"".join(line + b"\n" for line in kept))
        self._file = Lines(path)

    def write(self, record: Record) -> None:
        """Adds one record; if the disk is full, nothing of it."""
        if self._file is None:
            return
        self._file.write(json.dumps(record))

    def sync(self) -> None:
        """Waits until all records are on the disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
