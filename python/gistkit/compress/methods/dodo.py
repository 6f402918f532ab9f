"""Dodo: some tokens of the context, the nuggets, stand for all of it with their keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.memory import Memory
from gistkit.compress.methods.in_place import GISTS, TEXT, InPlace, InPlaceOptions, whole
from gistkit.compress.tokens import Rows, check_count
from gistkit.layouts import Plan
from gistkit.nn import Nuggets, NuggetScorer, straight_through, top_nuggets

if TYPE_CHECKING:
    from peft import LoraConfig

    from gistkit.compress.model import Use


Rule = Literal["learned", "strided", "random", "delimiters", "none"]
RULES = ("learned", "strided", "random", "delimiters", "none")
_MASK = 2**24 - 1


class Dodo(InPlace):
    """Dodo (Qin et al.): a context's ceil(n / ratio) best tokens, at every layer, are its memory.

    An encoder with parameters of its own reads BOS and the context. A scorer says from the hidden states of a low layer
    of the base model which tokens stay: those of the highest scores, and the last one. The decoder reads their keys and
    values where they stood (Sections 2.1, 2.3). The gradient of a nugget's attention logits is that of its score
    (Section 2.4). BOS stays too, as with all methods in place. `MixedResolution` makes a language model of it.

    Args:
        ratio: context tokens a nugget, a whole number >= 1.
        selection: "learned", or what it is measured against: "strided" (every `ratio`-th token), "random", "delimiters"
            (some of the tokens `delimiters`, at random), "none" (the last token alone).
        layer: iota, the layer of the base model whose hidden states are scored, 1 to all; behind its final norm.
        train_scorer: False leaves the scorer as it was drawn.
        separate: encoder and nuggets have parameters of their own (phi) beside those of the decoder (theta).
        delimiters: token ids.
        threshold: Lambda, the score that nuggets of a `MixedResolution` are above; `calibrate` there finds it.
        model, common: as in `InPlace`: losses, lora (a rank is that of query, key and value projections), window,
            end_token, bos_token.
    """

    method = "dodo"
    maps = "query_key_value"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int = 10,
        selection: Rule = "learned",
        layer: int = 3,
        train_scorer: bool = True,
        separate: bool = True,
        delimiters: Sequence[int] = (),
        threshold: float | None = None,
        **common: Unpack[InPlaceOptions],
    ) -> None:
        ratio = whole("ratio", ratio)
        if selection not in RULES:
            raise ValueError(f"selection: expected one of {', '.join(RULES)}, got {selection!r}")
        check_count("layer", layer)
        if (selection == "delimiters") != bool(len(delimiters)):
            raise ValueError(
                f"delimiters: expected token ids for selection='delimiters' alone, got {tuple(delimiters)} for "
                f"{selection!r}"
            )
        options = {"selection": selection, "layer": layer, "separate": separate, "delimiters": list(delimiters)}
        options["train_scorer"] = train_scorer
        self.selection, self.layer, self.delimiters = selection, layer, tuple(delimiters)
        threshold = _number("threshold", threshold)
        common = {"losses": ("ae",), "lora": 32, **common}
        super().__init__(model, ratio=ratio, options=options, separate=separate, **common)
        # Not an option of the layout: memories fit whatever the threshold is.
        self._settings["threshold"] = threshold
        self.scorer: NuggetScorer | None = None
        if selection == "learned":
            self.scorer = NuggetScorer(self.embed.embedding_dim).to(self.device, _at_least_float32(self.embed.weight))
            self.scorer.requires_grad_(train_scorer)

    @property
    def shortest(self) -> int:
        """Tokens a context has at least: the last one always stays."""
        return 1

    @property
    def title(self) -> str:
        """What a table calls it."""
        learned = "" if self._options["train_scorer"] else ", frozen scorer"
        return f"Dodo {self.chunk}x" + (learned if self.selection == "learned" else f", {self.selection}")

    @property
    def threshold(self) -> float:
        """Lambda: the score that nuggets of a `MixedResolution` are above (Equation 8)."""
        threshold = self._settings["threshold"]
        if threshold is None:
            threshold = rule_threshold(self.selection, self.chunk)
        if threshold is None:
            raise ValueError(
                "threshold: expected one for this selection, which sampled text has to tell, got None; see "
                "MixedResolution.calibrate"
            )
        return float(threshold)

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        self._settings["threshold"] = _number("threshold", value)

    @property
    def samples_threshold(self) -> bool:
        """Whether sampled text has to tell the threshold, which the other rules know."""
        return rule_threshold(self.selection, self.chunk) is None

    def install(self, lora: Mapping[str, LoraConfig] | None) -> None:
        """See `SharedModel.install`."""
        if not self.layer <= self.config.num_hidden_layers:
            raise ValueError(f"layer: expected 1 to {self.config.num_hidden_layers}, got {self.layer}")
        super().install(lora)

    def of_gists(self, name: str) -> bool:
        """False: all its parameters have one learning rate (Appendix B)."""
        return False

    def scores(self, rows: Rows, plan: Plan, keep: hf.Keeper | None = None) -> Tensor:
        """Scores [B, N] of the tokens of rows behind BOS, whose own is no one's; gradients reach the scorer alone.

        Args:
            rows: what `with_bos` returned.
            plan: of the pass through the lower layers that the scorer's hidden states come from, for all rows.
            keep: is given what these layers make, if there is such a pass.
        """
        if self.scorer is None:
            indices = torch.arange(-1, rows.ids.shape[1] - 1, device=self.device).expand_as(rows.ids)
            return rule_scores(self.selection, rows.ids, indices, self.chunk, self.delimiters)
        with torch.no_grad(), hf.attach(self.model), hf.first_layers(self.model, self.layer):
            hidden_states = self.lm.run(
                None, inputs_embeds=self.embed(rows.ids), plan=plan, keep=keep
            ).last_hidden_state
        return self.scorer(hidden_states)  # type: ignore[no-any-return]

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """A pass through the lower layers that says which tokens stay, and one that makes their keys and values."""
        input_rows = self.with_bos(rows)
        self.lm.check_positions("input_ids", max(input_rows.lengths) - 1)
        plan = self.lm.causal_plan(input_rows.ids.shape[1])
        scores = self.scores(input_rows, plan)
        return self.encode_nuggets(rows, self.nuggets(input_rows, scores), scores, plan=plan)

    @torch.no_grad()
    def whole_scores(self, input_rows: Rows) -> Tensor:
        """Scores [B, N] of the tokens of rows behind BOS, as `encode` makes them: each token has read all before it."""
        return self.scores(input_rows, self.lm.causal_plan(input_rows.ids.shape[1]))

    def nuggets(self, input_rows: Rows, scores: Tensor) -> Nuggets:
        """The tokens of rows behind BOS that stay, by their scores [B, N]; indices count BOS, which is none of them."""
        # A ratio as large as the text leaves the last token.
        ratio = scores.shape[1] if self.selection == "none" else self.chunk
        ragged = min(input_rows.lengths) < scores.shape[1]
        nuggets = top_nuggets(scores[:, 1:], ratio, input_rows.valid[:, 1:] if ragged else None)
        return Nuggets(nuggets.index + 1, nuggets.counts)

    def encode_nuggets(
        self,
        rows: Rows,
        nuggets: Nuggets,
        scores: Tensor | None = None,
        *,
        plan: Plan | None = None,
    ) -> tuple[Memory, Tensor]:
        """The memory of contexts whose nuggets are known, and the hidden states [B, 1 + K, d] of BOS and nuggets.

        Args:
            rows: contexts, as `contexts` returns them.
            nuggets: nuggets, by their places in the rows behind BOS; the last token is that of each row.
            scores: [B, N] of these rows, which get gradients through the memory; None: no gradients.
            plan: causal attention over the rows, with the model's sliding windows; None: is made.
        """
        input_rows = self.with_bos(rows)
        plan = self.lm.causal_plan(input_rows.ids.shape[1]) if plan is None else plan
        index = F.pad(nuggets.index, (1, 0))
        keep = hf.KeptKeys(index)
        out = self.lm.run(self._encoder, inputs_embeds=self.embed(input_rows.ids), plan=plan, keep=keep)
        hidden_states = out.last_hidden_state.take_along_dim(index[..., None], 1)
        last = torch.tensor(input_rows.lengths, device=index.device)[:, None] - 1
        bias = None
        if scores is not None and scores.requires_grad:
            # BOS and the last token stay whatever their scores, and get no gradient.
            bias = straight_through(scores.gather(1, index)).masked_fill((index == last) | (index == 0), 0)
        lengths = tuple(count + 1 for count in nuggets.counts)
        valid = torch.arange(index.shape[1]) < torch.tensor(lengths)[:, None]
        memory = Memory(
            source=self.source,
            lengths=lengths,
            context_lengths=rows.lengths,
            positions=index.cpu().where(valid, 0),
            starts=input_rows.lengths,
            layers=keep.close(),
            last=out.last_hidden_state.take_along_dim(last[..., None], 1)[:, 0],
            key_bias=bias,
        )
        return memory, hidden_states

    @property
    def _encoder(self) -> Use:
        if not self.separate:
            return TEXT
        return GISTS if self.adapters is not None else {GISTS: slice(None)}


def _at_least_float32(weight: Tensor) -> torch.dtype:
    # Scores are compared with each other: their rounding would decide.
    return weight.dtype if weight.dtype == torch.float64 else torch.float32


def _number(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"{name}: expected a number or None, got {value!r}")
    return float(value)


def rule_scores(rule: Rule, ids: Tensor, indices: Tensor, ratio: int, delimiters: tuple[int, ...]) -> Tensor:
    """Scores of a rule that is not learned; each token's depends on itself and its place alone.

    Args:
        rule: "strided": every `ratio`-th token; "random": any, the same ones whenever the text is the same;
            "delimiters": tokens of `delimiters`, and at random among them or beyond them; "none": no token.
        ids, indices: int64 of one shape, tokens and their places in the context, from 0.
        ratio: tokens a nugget.
        delimiters: token ids.

    Returns:
        float32 of that shape, in [0, 2).
    """
    if rule == "none":
        return torch.zeros(ids.shape, device=ids.device)
    if rule == "strided":
        return ((indices + 1) % ratio == 0).float()
    score = _uniform(ids, indices)
    if rule == "delimiters":
        score = score + torch.isin(ids, torch.tensor(delimiters, device=ids.device))
    return score


def rule_threshold(rule: Rule, ratio: int) -> float | None:
    """The threshold that a rule's selected tokens are above; None where sampled text has to tell."""
    return {"strided": 0.5, "random": math.nextafter(1 - 1 / ratio, -1), "none": math.inf}.get(rule)


def _uniform(ids: Tensor, indices: Tensor) -> Tensor:
    """Numbers in [0, 1) that look drawn, by a token and its place (the finaliser of MurmurHash3)."""
    mixed = ids * 0x9E3779B1 + indices * 0x85EBCA77 + 1
    for factor in (0x7F51AFD7ED558CCD - 2**62, 0x44CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> 33 & 0x7FFFFFFF)) * factor
    return (mixed >> 29 & _MASK).float() / (_MASK + 1)
