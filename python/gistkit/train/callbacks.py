"""Callback: what a training run tells of itself while it goes on; and its progress bar, which is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Callback:
    """What a `Trainer` calls while it trains; a subclass has those of the methods that it needs.

    The main process alone calls them, so they must not run the model where it is sharded (`Trainer`'s `measure` may).
    `on_step` and `on_evaluate` may return True: the run then ends behind that step, with a checkpoint and the trained
    compressor. With `resume=True` such a run goes on. This one ends a run at a held-out loss:

        class GoodEnough(train.Callback):
            def on_evaluate(self, step, held_out):
                return held_out["loss"] < 1.5

        train.Trainer(compressor, batches, recipe, "runs/first", callbacks=[GoodEnough()]).train()
    """

    def on_start(self, step: int, steps: int) -> None:
        """Before the first step and evaluation: `step` updates are made, 0 in a new run, of `steps`."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        """After an update: the number of all so far, and their record as in `read_metrics`."""

    def on_evaluate(self, step: int, held_out: Mapping[str, float]) -> bool | None:
        """After an evaluation behind `step` updates: its losses by name, and what else `measure` returned."""

    def on_save(self, step: int, path: Path) -> None:
        """When the checkpoint behind `step` updates is on the disk."""

    def on_end(self, step: int) -> None:
        """After `step` updates: the compressor is saved, or an error or a signal ended the run. Nothing follows."""


class Told(Callback):
    """Several callbacks as one, each told in its turn; those that have started are told of the end."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._started: list[Callback] = []

    def on_start(self, step: int, steps: int) -> None:
        for callback in self._callbacks:
            callback.on_start(step, steps)
            self._started.append(callback)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> bool:
        # A list: one that ends the run does not keep the others from hearing of the step.
        return any([callback.on_step(step, metrics) for callback in self._callbacks])

    def on_evaluate(self, step: int, held_out: Mapping[str, float]) -> bool:
        return any([callback.on_evaluate(step, held_out) for callback in self._callbacks])

    def on_save(self, step: int, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_save(step, path)

    def on_end(self, step: int) -> None:
        # An error of one does not keep the others open, nor hide the one that ended the run.
        if self._started:
            try:
                self._started.pop(0).on_end(step)
            finally:
                self.on_end(step)


class Bar(Callback):
    """A progress bar with the loss, the speed and the last held-out loss."""

    def __init__(self) -> None:
        self._held_out = ""

    def on_start(self, step: int, steps: int) -> None:
        self._bar = tqdm(total=steps, initial=min(step, steps), unit="step", dynamic_ncols=True)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._bar.update()
        text = f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:.0f} tokens/s"
        self._bar.set_postfix_str(text + self._held_out)

    def on_evaluate(self, step: int, held_out: Mapping[str, float]) -> None:
        self._held_out = f", held-out {held_out['loss']:.3f}"

    def on_end(self, step: int) -> None:
        self._bar.close()
