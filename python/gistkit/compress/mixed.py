"""MixedResolution: a language model that reads its recent tokens whole, and of the past before them the nuggets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import hf, layouts
from gistkit.compress.dodo import Dodo
from gistkit.compress.in_place import GISTS, TEXT
from gistkit.compress.language import LanguageModel, keys_seen
from gistkit.compress.mixed_stream import NuggetStream
from gistkit.compress.streaming import Stream
from gistkit.compress.tokens import Rows
from gistkit.layouts import Plan, Role
from gistkit.nn import nuggets_above, straight_through, threshold_for

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use


class MixedResolution(LanguageModel):
    """Dodo as an autoregressive language model (Section 2.2): all parameters are those of its compressor.

    A token sees BOS, the nuggets before it, and the last `tau` tokens, itself included, nuggets or not. Nuggets, of
    which the score is above the compressor's threshold, have the parameters phi, other tokens theta. Scores come from
    the base model's lower layers, in which a token sees BOS and the last `tau` tokens: nothing older is needed to read
    on. One pass reads a whole text, in training and to measure it; `start` reads token by token, with a cache that
    keeps what can still be seen.

    Args:
        compressor: its scorer, threshold and adapters serve here too; train it by either, or by one after the other.
        tau: number of most recent tokens seen uncompressed, at least 1.
        segment: tokens that share where the uncompressed part begins; divides tau. See `gistkit.layouts.dodo`.
    """

    def __init__(self, compressor: Dodo, *, tau: int = 128, segment: int = 32) -> None:
        if not isinstance(compressor, Dodo):
            raise TypeError(f"compressor: expected a Dodo, got {type(compressor).__name__}")
        super().__init__(compressor, tau, segment)
        self.compressor: Dodo = compressor

    @property
    def settings(self) -> dict[str, Any]:
        """What decides its losses beside parameters and text, which tell the threshold of most rules; JSON values."""
        settings = super().settings
        if self.compressor.samples_threshold:
            del settings["threshold"]
        return settings

    def scores(self, read: Rows, keep: hf.KeptKeys | None = None) -> Tensor:
        """Scores [B, N] of the tokens of rows behind BOS; `keep` sees the pass through the lower layers, if any."""
        nobody = np.zeros(read.ids.shape[1], bool)
        layout = layouts.dodo(nobody, self.tau, segment=self.segment, bos=True)
        its = self.compressor
        return its.scores(read, layout.compile(windows=its.windows, device=its.device), keep)

    def nuggets(self, read: Rows, scores: Tensor | None = None) -> Tensor:
        """bool [B, N], the tokens of rows behind BOS that are nuggets; BOS is none."""
        scores = self.scores(read) if scores is None else scores
        chosen = nuggets_above(scores, self.compressor.threshold, read.valid, keep_last=False)
        chosen[:, 0] = False
        return chosen

    @torch.no_grad()
    def calibrate(self, texts: Iterable[Any], ratio: float | None = None) -> float:
        """Sets the compressor's threshold, and returns it, so that one in `ratio` tokens of sampled text is a nugget.

        Args:
            texts: batches of texts, each what `__call__` takes.
            ratio: tokens a nugget; None: the compressor's.
        """
        found = []
        for text in texts:
            read = self.rows(text)
            found.append(self.scores(read)[:, 1:][read.valid[:, 1:]])
        if not found:
            raise ValueError("texts: expected at least one batch, got none")
        self.compressor.threshold = threshold_for(torch.cat(found), self.compressor.ratio if ratio is None else ratio)
        return self.compressor.threshold

    def plan(self, chosen: Tensor) -> Plan:
        """The plan of one pass in which the tokens of `chosen` [B, N] are nuggets; each role the same rows in all."""
        # The choice goes to the host once, for all layers.
        parts = [layouts.dodo(row, self.tau, segment=self.segment, bos=True) for row in chosen.cpu().numpy()]
        its = self.compressor
        return layouts.compile_batch(parts, aligned=True, windows=its.windows, device=its.device)

    def hidden(
        self,
        read: Rows,
        chosen: Tensor | None = None,
        *,
        keep: hf.KeptKeys | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Hidden states [B, N, d] at each token of rows behind BOS, from one pass.

        Args:
            read: what `rows` returned.
            chosen: bool [B, N], the nuggets; None: those above the threshold, whose scores then get gradients.
            keep: as in `gistkit.hf.attach`; it sees the rows of `plan`.
            plan: what `plan(chosen)` returned, where it is there already.
        """
        its, bias = self.compressor, None
        if chosen is None:
            scores = self.scores(read)
            chosen = self.nuggets(read, scores)
            if scores.requires_grad:
                bias = straight_through(scores).where(chosen, 0)
        if chosen.shape != read.ids.shape:
            raise ValueError(f"chosen: expected bool {list(read.ids.shape)}, got shape {tuple(chosen.shape)}")
        plan = self.plan(chosen) if plan is None else plan
        extra = plan.num_queries - read.ids.shape[1]
        ids = plan.arrange(F.pad(read.ids, (0, extra)))
        if bias is not None:
            bias = plan.arrange(F.pad(bias, (0, extra)))[:, None]
        with hf.attach(its.model):
            out = its.run(self._served(plan), inputs_embeds=its.embed(ids), plan=plan, key_bias=bias, keep=keep)
        return plan.restore(out.last_hidden_state)[:, : read.ids.shape[1]]

    def states(self, read: Rows, chosen: Tensor | None = None) -> Tensor:
        """int64 [B, N]: how many tokens' states each token of rows behind BOS sees, itself included; 0 on padding."""
        plan = self.plan(self.nuggets(read) if chosen is None else chosen)
        return plan.restore(keys_seen(plan))[:, : read.ids.shape[1]].where(read.valid, 0)

    def _start(self, read: Rows) -> Stream:
        return NuggetStream(self, read)

    def _served(self, plan: Plan) -> Use:
        if not self.compressor.separate:
            return TEXT
        rows = plan.num_queries
        nuggets = (plan.slices or {}).get(Role.MEMORY, slice(rows, rows))
        return {TEXT: slice(0, nuggets.start), GISTS: nuggets}
