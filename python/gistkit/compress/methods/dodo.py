"""Dodo: keeps the keys and values of selected context tokens, the nuggets."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gistkit import hf
from gistkit.common.checks import POSITIONS, check_int, placed
from gistkit.compress.config import register, setting
from gistkit.compress.memory import Memory
from gistkit.compress.methods.in_place import GISTS, TEXT, InPlace, InPlaceConfig
from gistkit.compress.tokens import Rows
from gistkit.hf.keep import Layers
from gistkit.hf.lora import Maps
from gistkit.layouts import Plan
from gistkit.nn import Nuggets, NuggetScorer, straight_through, top_nuggets
from gistkit.nn.nuggets import rule_scores, rule_threshold

if TYPE_CHECKING:
    from peft import LoraConfig

    from gistkit.compress.adapters import Use


Rule = Literal["learned", "strided", "random", "delimiters", "none"]
RULES = ("learned", "strided", "random", "delimiters", "none")


class Choice(NamedTuple):
    """What `Dodo.selecting` has put in place of `selection` and `ratio`, and whether the scorer rests."""

    rule: Rule | None = None
    ratio: int | None = None
    rests: bool = False


@register("dodo")
@dataclass(frozen=True, kw_only=True)
class DodoConfig(InPlaceConfig):
    """Dodo (Qin et al.): the memory is a context's ceil(n / ratio) best tokens, in every layer.

    Args:
        lora: as in `InPlaceConfig`, but a rank applies to query, key and value projections.
        selection: "learned", or a baseline: "strided" (every `ratio`-th token), "random", "delimiters" (a random choice
            of the tokens `delimiters`), "none" (only the last token).
        layer: iota, the layer of the base model whose hidden states are scored, from 1.
        train_scorer: False: the scorer keeps its random weights.
        scorer_norm: the scorer reads these hidden states after the model's final norm, not directly (Equation 15).
            Compressors saved before this option existed use the norm.
        separate: encoder and nuggets have their own parameters (phi) beside those of the decoder (theta).
        delimiters: token ids.
        threshold: Lambda; nuggets of a `MixedResolution` have a higher score. Its `calibrate` sets it.
    """

    maps: ClassVar[Maps] = "query_key_value"
    at_other_ratios: ClassVar[Mapping[str, Any]] = {"threshold": None}

    losses: Iterable[str] | Mapping[str, float] = setting(("ae",), in_memory=False)
    lora: int | LoraConfig | None = setting(32, in_memory=False)
    ratio: int = setting(10, least=1, in_memory=False)
    selection: Rule = setting("learned", among=RULES)
    layer: int = setting(3, least=1)
    train_scorer: bool = True
    # Memories fit whatever these two are.
    scorer_norm: bool = setting(False, before=True, in_memory=False)
    threshold: float | None = setting(None, in_memory=False)
    separate: bool = True
    delimiters: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.delimiters
        if not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
            raise TypeError(f"delimiters: expected token ids, got {ids!r}")
        self._set("delimiters", tuple(ids))
        if (self.selection == "delimiters") != bool(self.delimiters):
            raise ValueError(
                f"delimiters: expected token ids only for selection='delimiters', got {self.delimiters} for "
                f"{self.selection!r}"
            )
        if (number := self.threshold) is not None:
            if isinstance(number, bool) or not isinstance(number, Real) or math.isnan(number):
                raise ValueError(f"threshold: expected a number or None, got {number!r}")
            self._set("threshold", float(number))

    @property
    def title(self) -> str:
        learned = "" if self.train_scorer else ", frozen scorer"
        return f"Dodo {self.ratio}x" + (learned if self.selection == "learned" else f", {self.selection}")

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        layers = cast(Any, model).config.get_text_config().num_hidden_layers
        if self.layer > layers:
            raise ValueError(f"layer: expected 1 to {layers}, got {self.layer}")

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        parts, weight = super().parts(embed), embed.weight
        if self.selection != "learned":
            return parts | {"scorer": None}
        # In lower precision, rounding would decide between scores.
        dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        scorer = NuggetScorer(weight.shape[1]).to(weight.device, dtype)
        return parts | {"scorer": scorer.requires_grad_(self.train_scorer)}


class Dodo(InPlace, config=DodoConfig):
    """Dodo; arguments are those of `DodoConfig` and `InPlaceConfig`.

    An encoder with its own parameters reads BOS and the context. A scorer reads the hidden states of a low layer of the
    base model. The memory keeps the tokens with the highest scores and the last token. The decoder reads their keys and
    values at their positions (Sections 2.1, 2.3). A nugget's score receives the gradient of its attention logits, also
    the last token's (Section 2.4). The memory keeps BOS too, as in all in-place methods. `MixedResolution` turns a Dodo
    into a language model.
    """

    options: DodoConfig
    scorer: NuggetScorer | None

    _choice = Choice()

    @property
    def rule(self) -> Rule:
        """The rule that nuggets are selected by now: `selection`, but for inside `selecting`."""
        return self._choice.rule or self.options.selection

    @property
    def nugget_ratio(self) -> int:
        """Context tokens for each nugget now: `ratio`, but for inside `selecting`."""
        return self._choice.ratio or self.options.ratio

    @property
    def train_ratios(self) -> tuple[int, ...]:
        return tuple(self.options.train_ratios) if self._choice.ratio is None else ()

    def at(self, ratio: int) -> Self:
        """See `Compressor.at`; it has no threshold yet, and selects at its own ratio inside `selecting` too."""
        other = copy.copy(super().at(ratio)) if self._choice.ratio else super().at(ratio)
        other._choice = self._choice._replace(ratio=None)
        return other

    @contextmanager
    def selecting(
        self, rule: Rule | None = None, ratio: int | None = None, *, scorer_rests: bool = False
    ) -> Iterator[None]:
        """Inside, nuggets are selected by another rule or ratio; settings do not change.

        The threshold does not change either: a `MixedResolution` needs `calibrate` inside.

        Args:
            rule: instead of `selection`; "learned" where there is a scorer, "delimiters" where there are delimiters.
                "random" draws other tokens at every call, so that any token of any text is a nugget now and then. None:
                no other.
            ratio: instead of `ratio`, a whole number >= 1. None: no other.
            scorer_rests: freeze the scorer: scores have no gradients.
        """
        if rule is not None:
            self.check_rule(rule)
        ratio = None if ratio is None else check_int("ratio", ratio, high=POSITIONS, floats=True)
        before = self._choice
        self._choice = Choice(rule or before.rule, ratio or before.ratio, scorer_rests or before.rests)
        try:
            yield
        finally:
            self._choice = before

    def check_rule(self, rule: Rule) -> None:
        """Refuses a rule that this compressor cannot select by."""
        if rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
        if rule == "learned" and self.scorer is None:
            raise ValueError(f"rule: expected one without a scorer, as selection is {self.selection!r}, got {rule!r}")
        if rule == "delimiters" and not self.delimiters:
            raise ValueError(f"rule: expected one without delimiters, as the compressor has none, got {rule!r}")

    @property
    def threshold(self) -> float:
        """Lambda: nuggets of a `MixedResolution` have a score above it (Equation 8)."""
        found = self.options.threshold
        found = rule_threshold(self.selection, self.chunk) if found is None else found
        if found is None:
            raise ValueError(
                "threshold: expected one for this selection, which needs sampled text to find it, got None; see "
                "MixedResolution.calibrate"
            )
        return found

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        self.options = replace(self.options, threshold=value)

    @property
    def samples_threshold(self) -> bool:
        """Whether sampled text has to determine the threshold; the other rules determine it themselves."""
        return rule_threshold(self.selection, self.chunk) is None

    def install(self) -> None:
        for token in self.options.delimiters:
            self.lm.first_token("delimiters", token)
        super().install()

    def of_gists(self, name: str) -> bool:
        """False: all its parameters have one learning rate (Appendix B)."""
        return False

    def scores(self, rows: Rows, plan: Plan | None = None, keep: hf.Keeper | None = None) -> Tensor:
        """Scores [B, N] of the tokens of rows with BOS, whose own means nothing; gradients reach only the scorer.

        Args:
            rows: what `with_bos` returned.
            plan: of the pass through the lower layers that the scorer's hidden states come from, for all rows; None:
                each token reads all tokens before it.
            keep: collects keys and values of these layers, if there is such a pass.
        """
        if self._choice.rule == "random":
            return torch.rand(rows.ids.shape, device=self.device)
        if self.rule != "learned" or self.scorer is None:
            indices = torch.arange(-1, rows.ids.shape[1] - 1, device=self.device).expand_as(rows.ids)
            return rule_scores(self.rule, rows.ids, indices, self.nugget_ratio, self.delimiters)
        plan = self.lm.causal_plan(rows.ids.shape[1]) if plan is None else plan
        with torch.no_grad(), self.lm.attached(), self.lower_layers():
            out = self.lm.run(None, inputs_embeds=self.embed(rows.ids), plan=plan, keep=keep)
        scores: Tensor = self.scorer(out.last_hidden_state)
        return scores.detach() if self._choice.rests else scores

    def lower_layers(self) -> AbstractContextManager[None]:
        """Inside, a pass ends after `layer` layers, and its hidden states are what the scorer reads."""
        return hf.first_layers(self.model, self.layer, norm=self.options.scorer_norm)

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """A pass through the lower layers selects the nuggets; a second pass computes their keys and values."""
        input_rows = self.with_bos(rows)
        self.lm.check_positions("input_ids", max(input_rows.lengths) - 1)
        scores = self.scores(input_rows)
        return self.encode_nuggets(rows, self.nuggets(input_rows, scores), scores)

    @torch.no_grad()
    def whole_scores(self, input_rows: Rows) -> Tensor:
        """`scores` [B, N] of the tokens of rows with BOS as `encode` computes them, without gradients."""
        return self.scores(input_rows)

    def nuggets(self, input_rows: Rows, scores: Tensor) -> Nuggets:
        """The nuggets of rows with BOS, by their scores [B, N]; indices count BOS, which is not a nugget."""
        # A ratio as large as the text leaves the last token.
        ratio = scores.shape[1] if self.rule == "none" else self.nugget_ratio
        ragged = min(input_rows.lengths) < scores.shape[1]
        nuggets = top_nuggets(scores[:, 1:], ratio, input_rows.valid[:, 1:] if ragged else None)
        return Nuggets(nuggets.index + 1, nuggets.counts)

    def encode_nuggets(self, rows: Rows, nuggets: Nuggets, scores: Tensor | None = None) -> tuple[Memory, Tensor]:
        """The memory of contexts whose nuggets are known, and the hidden states [B, 1 + K, d] of BOS and nuggets.

        Args:
            rows: contexts, as `contexts` returns them.
            nuggets: their indices in the rows with BOS; the last nugget is the last token of each row.
            scores: [B, N] of these rows, which get gradients through the memory; None: no gradients.
        """
        input_rows = self.with_bos(rows)
        index = F.pad(nuggets.index, (1, 0))
        hidden_states, layers = self.read_nuggets(input_rows, nuggets)
        last = placed(nuggets.counts, index.device)[:, None, None]
        bias = None
        if scores is not None and scores.requires_grad:
            # BOS is no nugget. The last token is one whatever its score is: Equation 17 makes no exception of it.
            bias = straight_through(scores.gather(1, index)).masked_fill(index == 0, 0)
        lengths = tuple(count + 1 for count in nuggets.counts)
        valid = torch.arange(index.shape[1]) < torch.tensor(lengths)[:, None]
        memory = Memory(
            source=replace(self.source, chunk=self.nugget_ratio),
            lengths=lengths,
            context_lengths=rows.lengths,
            positions=index.cpu().where(valid, 0),
            starts=input_rows.lengths,
            layers=tuple(layers),
            last=hidden_states.take_along_dim(last, 1)[:, 0],
            straight_through=bias,
        )
        return memory, hidden_states

    def read_nuggets(self, input_rows: Rows, nuggets: Nuggets) -> tuple[Tensor, Layers]:
        """Hidden states [B, 1 + K, d] of BOS and nuggets, and their keys and values, from a pass over rows with BOS."""
        index = F.pad(nuggets.index, (1, 0))
        keep = hf.KeptKeys(index)
        inputs = self.lm.embedded(self._encoder, input_rows.ids)
        plan = self.lm.causal_plan(input_rows.ids.shape[1])
        out = self.lm.run(self._encoder, inputs_embeds=inputs, plan=plan, keep=keep)
        return out.last_hidden_state.take_along_dim(index[..., None], 1), keep.close()

    def kept_tokens(self, memory: Memory) -> list[int]:
        return memory.positions[0, : memory.lengths[0]].tolist()  # type: ignore[no-any-return]

    def context_spans(self, memory: Memory) -> Tensor:
        """See `Compressor.context_spans`: a nugget represents itself and the tokens since the previous nugget."""
        spans = torch.zeros(memory.batch_size, memory.num_tokens, 2, dtype=torch.int64)
        for row, length in enumerate(memory.lengths):
            bos, lengths = self.documents_of(memory, row)
            if length <= len(lengths) or memory.positions.dim() != 2:
                raise ValueError(
                    f"memory: expected positions of BOS and of a nugget for each of {len(lengths)} documents, got "
                    f"positions of shape {tuple(memory.positions.shape)} and {length} memory tokens"
                )
            ends = memory.positions[row, 1:length]
            starts = F.pad(ends[:-1], (1, 0))
            # Positions count BOS once; the last token of each document is a nugget.
            own = bos * (1 + torch.bucketize(starts, torch.tensor(lengths).cumsum(0), right=True))
            spans[row, 1:length] = torch.stack([starts + own, ends + own], -1)
        return spans

    @property
    def _encoder(self) -> Use:
        if not self.separate:
            return TEXT
        return GISTS if self.adapters is not None else {GISTS: slice(None)}
