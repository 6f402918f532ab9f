"""Recent: the plain model as a language model that sees only its last tokens."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gistkit import hf, layouts
from gistkit.common.checks import padded
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.reading.cache import StreamCache
from gistkit.compress.reading.language import LanguageModel, Stream
from gistkit.compress.tokens import Rows


class _RecentStream(Stream):
    """The stream of a `Recent`, whose cache holds about tau tokens."""

    def _first_pass(self, rows: Rows) -> tuple[Tensor, StreamCache]:
        positions = self._recent()
        keep = hf.KeptKeys(padded(positions, device=self.reader.compressor.device))
        hidden_states = self.reader.hidden(rows, keep=keep)
        # Dropping copies all remaining keys, so it waits for 64 tokens.
        cache = StreamCache(
            keep.close(), positions, [()] * len(positions), self.reader.first, self.ends, room=64, lag=63
        )
        return hidden_states, cache


class Recent(LanguageModel):
    """The plain model, which sees BOS and the last `tau` tokens, itself included.

    Args:
        compressor: its model and BOS are used, without adapters.
        tau: at least 1.
    """

    role = None
    stream = _RecentStream

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
