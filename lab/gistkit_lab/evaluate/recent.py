"""Recent: the plain model as a language model that sees only its last tokens."""

from __future__ import annotations

import numpy as np

from gistkit import layouts
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.reading.language import LanguageModel


class Recent(LanguageModel):
    """The plain model, which sees BOS and the last `tau` tokens, itself included.

    Args:
        compressor: its model and BOS are used, without adapters.
        tau: at least 1.
    """

    role = None

    def __init__(self, compressor: InPlace, tau: int) -> None:
        if not isinstance(compressor, InPlace):
            raise TypeError(
                f"compressor: expected one that compresses in place, such as AvgPool, got {type(compressor).__name__}"
            )
        super().__init__(compressor, tau, 1)

    @property
    def title(self) -> str:
        """The name in tables."""
        return f"last {self.tau} tokens"

    def plan(self, seen: int) -> layouts.Plan:
        """See `LanguageModel.plan`."""
        layout = layouts.dodo(np.zeros(seen, bool), self.tau, segment=1, bos=True)
        return layout.compile(windows=self.compressor.lm.windows, device=self.compressor.device)
