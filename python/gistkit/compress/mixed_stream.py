"""NuggetStream: texts read on token by token, of which nuggets and recent tokens are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gistkit import hf
from gistkit.compress.held import Held, padded
from gistkit.compress.in_place import GISTS, TEXT
from gistkit.compress.selection import rule_scores
from gistkit.compress.streaming import Stream
from gistkit.compress.tokens import Rows
from gistkit.nn import nuggets_above

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use
    from gistkit.compress.mixed import MixedResolution


class NuggetStream(Stream):
    """What a `MixedResolution` reads on, with a cache of about n / ratio + tau of n tokens."""

    reader: MixedResolution

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held, those that scores are made with too."""
        return super().nbytes + (0 if self._scored is None else self._scored.nbytes)

    def _read(self, read: Rows) -> tuple[Tensor, Held]:
        reader, device = self.reader, self.reader.compressor.device
        self._scored: Held | None = None
        keep, recent = None, self._recent()
        if reader.compressor.scorer is not None:
            keep = hf.KeptKeys(padded(recent, device))
        scores = reader.scores(read, keep=keep)
        if keep is not None:
            self._scored = self._holding(keep, recent, [()] * len(recent))
        chosen = reader.nuggets(read, scores)
        nuggets = [row.nonzero()[0].tolist() for row in chosen.cpu().numpy()]
        left = [sorted({*row, *its}) for row, its in zip(recent, nuggets, strict=True)]
        plan = reader.plan(chosen)
        where = padded(left, device)
        keep = hf.KeptKeys(where if plan.inverse is None else plan.inverse.gather(1, where))
        return reader.hidden(read, chosen, plan=plan, keep=keep), self._holding(keep, left, nuggets)

    def _chosen(self, tokens: Tensor, inputs: Tensor) -> Sequence[bool]:
        its = self.reader.compressor
        chosen = nuggets_above(self._scores(tokens, inputs)[:, None], its.threshold, keep_last=False)
        return chosen[:, 0].tolist()

    def _scores(self, tokens: Tensor, inputs: Tensor) -> Tensor:
        """Scores [B] of the next tokens."""
        its = self.reader.compressor
        if its.scorer is None or self._scored is None:
            places = torch.tensor(self.ends, device=its.device) - 1
            return rule_scores(its.selection, tokens, places, its.chunk, its.delimiters)
        self._scored.clear(self.ends)
        plan = self._scored.plan(self.ends, its.windows)
        with hf.first_layers(its.model, its.layer):
            out = its.run(None, inputs_embeds=inputs, plan=plan, past_key_values=self._scored.cache)
        self._scored.add(self.ends, [False] * len(self.ends))
        scores: Tensor = its.scorer(out.last_hidden_state)
        return scores[:, 0]

    def _served(self, chosen: Sequence[bool]) -> Use:
        if not self.reader.compressor.separate:
            return TEXT
        roles = tuple(GISTS if nugget else TEXT for nugget in chosen)
        return roles if len(set(roles)) > 1 or self.reader.compressor.adapters is None else roles[0]

    def _holding(self, keep: hf.KeptKeys, left: Sequence[Sequence[int]], nuggets: Sequence[Iterable[int]]) -> Held:
        return Held(keep.close(), left, nuggets, self.reader.first, self.ends, self.reader.segment)
