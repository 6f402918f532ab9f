"""Trackers of a training run: TensorBoard, Weights & Biases or one's own, through Accelerate's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers

from gistkit.common.files import write_bytes
from gistkit.train.callbacks import Callback

TRACKERS = ("tensorboard", "wandb")
# The name of the project of Weights & Biases, and of the folder of TensorBoard's files.
PROJECT = "gistkit"
# Beside the checkpoints: by this a resumed run goes on in the same run of Weights & Biases.
RUN_ID = "wandb-id.txt"

Tracker: TypeAlias = str | GeneralTracker


def check_trackers(track: Tracker | Sequence[Tracker]) -> list[Tracker]:
    """Each tracker once.

    Raises:
        ValueError: if a name is none of `TRACKERS`.
        ImportError: if the package of a tracker is missing.
    """
    trackers: list[Tracker] = []
    for tracker in [track] if isinstance(track, str | GeneralTracker) else track:
        if not isinstance(tracker, GeneralTracker) and tracker not in TRACKERS:
            raise ValueError(
                f"track: expected some of {', '.join(TRACKERS)}, or trackers of Accelerate, got {tracker!r}"
            )
        # Accelerate goes on without them.
        if isinstance(tracker, str) and tracker not in map(str, get_available_trackers()):
            raise ImportError(f"track: {tracker!r} needs the package {tracker}; pip install {tracker} brings it")
        if tracker not in trackers:
            trackers.append(tracker)
    return trackers


class Tracked(Callback):
    """Gives the figures of a run to the trackers of its Accelerator, which logs "train/NAME" and "held_out/NAME".

    Args:
        accelerator: made with `log_with`; this process is its main one.
        folder: of the run.
        config: what determines the run, by name; values inside of others are logged as "outer.inner".
    """

    def __init__(self, accelerator: Accelerator, folder: Path, config: Mapping[str, Any]) -> None:
        self._accelerator, self._folder, self._config = accelerator, folder, config

    def on_start(self, step: int, steps: int) -> None:
        options: dict[str, Any] = {}
        if "wandb" in map(str, self._accelerator.log_with):
            name = self._folder.resolve().name
            run_id, folder = self._run_id(new=step == 0), str(self._folder)
            options["wandb"] = {"id": run_id, "resume": "allow", "name": name, "dir": folder}
        if step:
            # What an interrupted run wrote behind its last checkpoint comes again.
            options["tensorboard"] = {"purge_step": step + 1}
        # A resumed run has its configuration already.
        config = None if step else {"steps": steps} | dict(_flat("", self._config))
        self._accelerator.init_trackers(PROJECT, config, options)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._log("train", metrics, step)

    def on_evaluate(self, step: int, held_out: Mapping[str, float]) -> None:
        self._log("held_out", held_out, step)

    def on_end(self, step: int) -> None:
        # In place of `end_training`, which ends the process group too: another run may follow in it.
        while self._accelerator.trackers:
            self._accelerator.trackers.pop(0).finish()

    def _log(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items() if name != "step"}
        self._accelerator.log(named, step=step)

    def _run_id(self, *, new: bool) -> str:
        path = self._folder / RUN_ID
        if new or not path.exists():
            write_bytes(path, uuid.uuid4().hex.encode())
        return path.read_text()


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str | bool | int | float]]:
    """The values inside of others by joined names, as the kinds that all trackers take."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value if isinstance(value, str | bool | int | float) else str(value)
