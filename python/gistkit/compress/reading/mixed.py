"""MixedResolution: a language model that sees its recent tokens, and of the past before them only nuggets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import hf, layouts
from gistkit.common.checks import padded, placed
from gistkit.compress.adapters import Use
from gistkit.compress.methods.dodo import Dodo
from gistkit.compress.methods.in_place import GISTS, TEXT
from gistkit.compress.reading.cache import StreamCache
from gistkit.compress.reading.language import LanguageModel, Stream, keys_seen
from gistkit.compress.tokens import Rows
from gistkit.layouts import Plan
from gistkit.layouts.dodo import nuggets_of, with_nuggets_again
from gistkit.nn import nuggets_above, straight_through, threshold_for
from gistkit.nn.nuggets import rule_scores


class MixedResolution(LanguageModel):
    """Dodo as an autoregressive language model (Section 2.2): all parameters are those of its compressor.

    A token sees BOS, the nuggets before it, and the last `tau` tokens, itself included, nuggets or not. Nuggets are the
    tokens with a score above the compressor's threshold; they have the parameters phi, other tokens theta. Scores come
    from the base model's lower layers, in which a token sees BOS and the last `tau` tokens, so reading on needs nothing
    older. Training and measuring read a whole text in one pass; `start` reads token by token, with a cache of the keys
    that can still be seen.

    Args:
        compressor: its scorer, threshold and adapters are used; train the compressor, this model, or both in turn.
        tau: number of most recent tokens seen uncompressed, at least 1.
        segment: tokens that share the beginning of the uncompressed part; divides tau. See `gistkit.layouts.dodo`.
    """

    def __init__(self, compressor: Dodo, *, tau: int = 128, segment: int = 32) -> None:
        if not isinstance(compressor, Dodo) or compressor.adapts_some:
            raise TypeError(f"compressor: expected a Dodo, got {type(compressor).__name__}")
        super().__init__(compressor, tau, segment)
        self.compressor: Dodo = compressor

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the losses besides parameters and text, which determine most thresholds; JSON values."""
        settings = super().settings
        if self.compressor.samples_threshold:
            del settings["threshold"]
        return settings

    def scores(self, rows: Rows, keep: hf.KeptKeys | None = None) -> Tensor:
        """Scores [B, N] of the tokens of rows with BOS; `keep` is for the pass through the lower layers, if any."""
        nobody = np.zeros(rows.ids.shape[1], bool)
        layout = layouts.dodo(nobody, self.tau, segment=self.segment, bos=True)
        compressor = self.compressor
        return compressor.scores(rows, layout.compile(windows=compressor.lm.windows, device=compressor.device), keep)

    def nuggets(self, rows: Rows, scores: Tensor | None = None) -> Tensor:
        """bool [B, N], the nuggets among the tokens of rows with BOS; BOS is not one."""
        scores = self.scores(rows) if scores is None else scores
        is_nugget = nuggets_above(scores, self.compressor.threshold, rows.valid)
        is_nugget[:, 0] = False
        return is_nugget

    @torch.no_grad()
    def calibrate(self, texts: Iterable[Any], ratio: float | None = None) -> float:
        """Sets and returns the compressor's threshold, such that one in `ratio` tokens of sampled text is a nugget.

        Args:
            texts: batches of texts, each as `__call__` takes it.
            ratio: tokens for each nugget; None: the compressor's `nugget_ratio`.
        """
        scores = []
        for text in texts:
            rows = self.rows(text)
            scores.append(self.scores(rows)[:, 1:][rows.valid[:, 1:]])
        if not scores:
            raise ValueError("texts: expected at least one batch, got none")
        ratio = self.compressor.nugget_ratio if ratio is None else ratio
        self.compressor.threshold = threshold_for(torch.cat(scores), ratio)
        return self.compressor.threshold

    def plan(self, seen: Tensor) -> Plan:
        """The plan of one pass with the nuggets `seen`, bool [B, N]; every role has the same columns in all rows."""
        # The choice is copied to the host once, for all layers.
        parts = [layouts.dodo(row, self.tau, segment=self.segment, bos=True) for row in seen.cpu().numpy()]
        compressor = self.compressor
        return layouts.compile_batch(parts, aligned=True, windows=compressor.lm.windows, device=compressor.device)

    def hidden(
        self,
        rows: Rows,
        is_nugget: Tensor | None = None,
        *,
        keep: hf.KeptKeys | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Hidden states [B, N, d] at each token of rows with BOS, from one pass.

        Args:
            rows: what `rows` returned.
            is_nugget: bool [B, N], the nuggets; None: those above the threshold, whose scores then get the gradients of
                their logits from the tokens that read them as nuggets, not from those that see them uncompressed
                (Equation 18).
            keep: as in `gistkit.hf.attach`; it gets the tokens in the plan's order.
            plan: what `plan(is_nugget)` returned; None: it is made here.
        """
        compressor, scores = self.compressor, None
        if is_nugget is None:
            scores = self.scores(rows)
            is_nugget = self.nuggets(rows, scores)
        if is_nugget.shape != rows.ids.shape:
            raise ValueError(f"is_nugget: expected bool {list(rows.ids.shape)}, got shape {tuple(is_nugget.shape)}")
        plan = self.plan(is_nugget) if plan is None else plan
        extra = plan.num_queries - rows.ids.shape[1]
        ids = plan.arrange(F.pad(rows.ids, (0, extra)))
        reading: dict[str, Any] = {"plan": plan}
        if scores is not None and scores.requires_grad:
            bias = plan.arrange(F.pad(straight_through(scores), (0, extra)))
            reading = self._with_bias(plan, bias)
        use = self._roles(plan)
        with compressor.lm.attached():
            out = compressor.lm.run(use, inputs_embeds=compressor.lm.embedded(use, ids), keep=keep, **reading)
        return plan.restore(out.last_hidden_state)[:, : rows.ids.shape[1]]

    def _with_bias(self, plan: Plan, bias: Tensor) -> dict[str, Any]:
        """Arguments of a pass in which the bias [B, N], in the plan's order, acts where tokens read others as nuggets.

        There they read a second copy of the nugget's key and value, and only that copy has the bias.
        """
        nuggets = nuggets_of(plan)

        def extend(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat([key, key[:, :, nuggets]], 2), torch.cat([value, value[:, :, nuggets]], 2)

        return {
            "plan": with_nuggets_again(plan, self.tau, self.segment),
            "key_bias": F.pad(bias[:, nuggets], (plan.num_keys, 0))[:, None],
            "extend": extend,
        }

    def states(self, rows: Rows, is_nugget: Tensor | None = None) -> Tensor:
        """int64 [B, N]: how many tokens each token of rows with BOS sees, itself included; 0 on padding."""
        plan = self.plan(self.nuggets(rows) if is_nugget is None else is_nugget)
        return plan.restore(keys_seen(plan))[:, : rows.ids.shape[1]].where(rows.valid, 0)

    def _roles(self, plan: Plan) -> Use:
        if not self.compressor.separate:
            return TEXT
        nuggets = nuggets_of(plan)
        return {TEXT: slice(0, nuggets.start), GISTS: nuggets}


class NuggetStream(Stream):
    """The stream of a `MixedResolution`, whose cache holds about n / ratio + tau of n tokens."""

    reader: MixedResolution

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._scored is None else self._scored.nbytes)

    def _first_pass(self, rows: Rows) -> tuple[Tensor, StreamCache]:
        reader, device = self.reader, self.reader.compressor.device
        # Those of the start, whatever `Dodo.selecting` says at a step: scores are compared with one threshold.
        self._rule, self._ratio = reader.compressor.rule, reader.compressor.nugget_ratio
        self._scored: StreamCache | None = None
        keep, recent = None, self._recent()
        if self._rule == "learned":
            keep = hf.KeptKeys(padded(recent, device=device))
        scores = reader.scores(rows, keep=keep)
        if keep is not None:
            self._scored = self._cache_of(keep, recent, [()] * len(recent))
        is_nugget = reader.nuggets(rows, scores)
        nuggets = [row.nonzero()[0].tolist() for row in is_nugget.cpu().numpy()]
        remaining = [sorted({*row, *row_nuggets}) for row, row_nuggets in zip(recent, nuggets, strict=True)]
        plan = reader.plan(is_nugget)
        columns = padded(remaining, device=device)
        keep = hf.KeptKeys(columns if plan.inverse is None else plan.inverse.gather(1, columns))
        return reader.hidden(rows, is_nugget, plan=plan, keep=keep), self._cache_of(keep, remaining, nuggets)

    def _take_back(self) -> None:
        super()._take_back()
        if self._scored is not None:
            self._scored.take_back(self.ends)

    def _stays(self, tokens: Tensor, inputs: Tensor) -> Sequence[bool]:
        compressor = self.reader.compressor
        is_nugget = nuggets_above(self._scores(tokens, inputs)[:, None], compressor.threshold)
        return is_nugget[:, 0].tolist()

    def _scores(self, tokens: Tensor, inputs: Tensor) -> Tensor:
        """Scores [B] of the next tokens."""
        compressor = self.reader.compressor
        if compressor.scorer is None or self._scored is None:
            indices = placed(self.ends, compressor.device) - 1
            return rule_scores(self._rule, tokens, indices, self._ratio, compressor.delimiters)
        self._scored.clear(self.ends)
        plan = self._scored.plan(self.ends, compressor.lm.windows)
        with compressor.lower_layers():
            out = compressor.lm.run(None, inputs_embeds=inputs, plan=plan, cache=self._scored.cache)
        self._scored.add(self.ends, [False] * len(self.ends))
        scores: Tensor = compressor.scorer(out.last_hidden_state)
        return scores[:, 0]

    def _roles(self, is_nugget: Sequence[bool]) -> Use:
        if not self.reader.compressor.separate:
            return TEXT
        roles = tuple(GISTS if nugget else TEXT for nugget in is_nugget)
        return roles if len(set(roles)) > 1 or self.reader.compressor.adapters is None else roles[0]

    def _cache_of(
        self, keep: hf.KeptKeys, positions: Sequence[Sequence[int]], nuggets: Sequence[Iterable[int]]
    ) -> StreamCache:
        return StreamCache(keep.close(), positions, nuggets, self.reader.first, self.ends, self.reader.segment)


MixedResolution.stream = NuggetStream
