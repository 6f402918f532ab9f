"""Metrics: the figures of a training run, as JSON lines and optionally for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gistkit._files import write_text

Record = dict[str, Any]


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a metrics file, in order.

    A record of a step holds "step" (updates done), every loss by name (nats a token), "loss", "lr", "grad_norm" (before
    clipping), "tokens_per_second" and "seconds" (training so far); one of an evaluation holds "step" and "held_out",
    its losses. An incomplete last line is ignored.
    """
    lines = Path(path).read_text("utf-8").split("\n")
    # A complete line ends in a newline: what follows the last one was interrupted.
    return [json.loads(line) for line in lines[:-1]]


class Metrics:
    """Writes records, each at once, to `folder`/metrics.jsonl.

    Args:
        folder: exists.
        step: an existing file keeps its records up to this number of updates.
        tensorboard: whether to write event files into `folder`/tensorboard too. Needs the package `tensorboard`.
        write: False in all processes but one, which then write nothing.

    Raises:
        ImportError: if `tensorboard` is True and the package is not installed.
    """

    def __init__(self, folder: Path, *, step: int = 0, tensorboard: bool = False, write: bool = True) -> None:
        self._board: Any = None
        self._file = None
        if not write:
            return
        if tensorboard:
            self._board = _summary_writer(folder / "tensorboard", step)
        path = folder / "metrics.jsonl"
        if path.exists():
            records = [record for record in read_metrics(path) if step and record["step"] <= step]
            write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Adds one record."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                parts = value if isinstance(value, dict) else {"": value}
                for part, number in parts.items():
                    if name != "step":
                        tag = f"{name}/{part}" if part else f"train/{name}"
                        self._board.add_scalar(tag, number, record["step"])

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ImportError(
            "tensorboard=True needs the package tensorboard; pip install tensorboard brings it"
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
