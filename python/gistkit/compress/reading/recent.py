"""Recent: the plain model as a language model that sees only its last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gistkit import hf, layouts
from gistkit.common.checks import padded
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.model import Use
from gistkit.compress.reading.cache import StreamCache
from gistkit.compress.reading.language import LanguageModel, Stream, keys_seen
from gistkit.compress.tokens import Rows


class Recent(LanguageModel):
    """The plain model, which sees BOS and the last `tau` tokens, itself included.

    Args:
        compressor: its model and BOS are used, without adapters.
        tau: at least 1.
    """

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

    def hidden(self, rows: Rows, *, keep: hf.KeptKeys | None = None) -> Tensor:
        """Hidden states [B, N, d] at each token of rows with BOS, from one pass; `keep` as in `gistkit.hf.attach`."""
        compressor = self.compressor
        with compressor.lm.attached():
            out = compressor.lm.run(None, inputs_embeds=compressor.embed(rows.ids), plan=self._plan(rows), keep=keep)
        return out.last_hidden_state  # type: ignore[no-any-return]

    def states(self, rows: Rows) -> Tensor:
        """int64 [B, N]: how many tokens each token of rows with BOS sees, itself included; 0 on padding."""
        return keys_seen(self._plan(rows)).where(rows.valid, 0)

    def _start(self, rows: Rows) -> Stream:
        return _RecentStream(self, rows)

    def _plan(self, rows: Rows) -> layouts.Plan:
        layout = layouts.dodo(np.zeros(rows.ids.shape[1], bool), self.tau, segment=1, bos=True)
        return layout.compile(windows=self.compressor.lm.windows, device=self.compressor.device)


class _RecentStream(Stream):
    """The stream of a `Recent`, whose cache holds about tau tokens."""

    reader: Recent

    def _first_pass(self, rows: Rows) -> tuple[Tensor, StreamCache]:
        positions = self._recent()
        keep = hf.KeptKeys(padded(positions, device=self.reader.compressor.device))
        hidden_states = self.reader.hidden(rows, keep=keep)
        # Dropping copies all remaining keys, so it waits for 64 tokens.
        cache = StreamCache(
            keep.close(), positions, [()] * len(positions), self.reader.first, self.ends, room=64, lag=63
        )
        return hidden_states, cache

    def _roles(self, stays: Sequence[bool]) -> Use:
        return None
