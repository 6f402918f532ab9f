"""Best: the evaluation with the lowest held-out loss, whose weights a run with patience ends with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gistkit.train import checkpoint

# Beside the checkpoints: the trained weights of that evaluation, without the optimizer's state.
NAME = "best.safetensors"


class Best:
    """The lowest held-out loss so far.

    Args:
        folder: of the run.
        progress: of the checkpoint that the run goes on from, see `progress`; None: there is none.

    Attributes:
        step: number of updates before that evaluation; None: there was none, or an earlier release saw it.
        held_out: its losses by name, and what else it measured.
        waited: evaluations since then.
    """

    def __init__(self, folder: Path, progress: Mapping[str, Any] | None = None) -> None:
        # Earlier releases counted nothing, and later ones kept no weights.
        values = progress or {}
        loss = values.get("best")
        self.path = folder / NAME
        self.loss: float = math.inf if loss is None else loss
        self.waited: int = values.get("waited", 0)
        self.step: int | None = values.get("best_step")
        self.held_out: dict[str, float] = values.get("best_held_out", {})

    @property
    def progress(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        loss = self.loss if self.loss < math.inf else None
        return {"best": loss, "waited": self.waited, "best_step": self.step, "best_held_out": self.held_out}

    def see(self, step: int, loss: float, held_out: Mapping[str, float]) -> bool:
        """Counts an evaluation after `step` updates; whether its loss is lower than those before."""
        if not loss < self.loss:
            self.waited += 1
            return False
        self.loss, self.waited, self.step, self.held_out = loss, 0, step, dict(held_out)
        return True

    def keep(self, parameters: checkpoint.NamedParameters, *, write: bool) -> None:
        """Writes the weights, which are those of `step`, over those of the evaluation before; see `checkpoint.save`."""
        checkpoint.save(self.path, {}, {"step": self.step}, parameters, None, write=write)

    def restore(self, parameters: checkpoint.NamedParameters, *, warn: bool) -> int | None:
        """Copies the weights of `step` into the parameters, and returns it.

        They may be gone: damaged, or of a later evaluation that a run which went on from before it, with other
        evaluations, never made. Then nothing changes, with a warning, and None comes back.

        Args:
            warn: False in all processes but one.
        """
        try:
            if self.step is None:
                raise ValueError(f"{self.path}: expected the weights of the lowest held-out loss, got none")
            checkpoint.restore(self.path, parameters, step=self.step)
        except (OSError, ValueError) as error:
            if warn:
                warnings.warn(f"{error}; the trained weights are those of the last step", stacklevel=2)
            return None
        return self.step
