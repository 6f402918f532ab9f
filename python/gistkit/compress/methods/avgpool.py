"""AvgPool: the text reads means of the context's activations. NoContext: the text reads nothing of the context."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.common.checks import placed
from gistkit.compress.methods.in_place import InPlace, InPlaceOptions
from gistkit.compress.tokens import Rows


class AvgPool(InPlace):
    """AvgPool (Getting to the Gist of Gisting, Section 4); with ratio 1 it is the model that reads the whole context.

    In layer l the text sees BOS and means over every `ratio` context tokens of what enters layer l, at the mean of
    their position ids. There are no parameters besides the model's, but for a soft prompt.

    Args:
        ratio: context tokens in each mean, a whole number >= 1; the last window may be shorter.
        pool: "hidden": means of hidden states, through the layer's norm and projections; "kv": means of keys, as they
            are before rotation, and of values.
        past: the means that `Compressive` keeps of its past, "hidden" or "kv" as in `pool`; None: as `pool` says.
        soft_prompt: a learned embedding takes the place of BOS's where `Compressive` reads on (Dodo, Appendix B.3); it
            begins as BOS's. Nothing else uses it.
        model, common: as in `InPlace`: losses, lora, window, end_token, bos_token.
    """

    method = "avgpool"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int = 5,
        pool: Literal["hidden", "kv"] = "hidden",
        past: Literal["hidden", "kv"] | None = None,
        soft_prompt: bool = False,
        **common: Unpack[InPlaceOptions],
    ) -> None:
        if pool not in ("hidden", "kv"):
            raise ValueError(f"pool: expected hidden or kv, got {pool!r}")
        if past not in ("hidden", "kv", None):
            raise ValueError(f"past: expected hidden, kv or None, got {past!r}")
        if past == "hidden":
            hf.check_projects(model)
        super().__init__(
            model,
            ratio=ratio,
            layout={},
            options={"pool": pool, "past": past, "soft_prompt": soft_prompt},
            reads="means" if pool == "hidden" else "means_of_keys",
            **common,
        )
        self.pool = pool
        self.past = pool if past is None else past
        start = self.embed(placed([self.bos_token], self.device)).detach()
        self.soft_prompt = nn.Parameter(start.clone().float()) if soft_prompt else None


class NoContext(InPlace):
    """The No context baseline (Getting to the Gist of Gisting, Section 2), trained like the other methods.

    The text sees BOS and no context; its position ids begin after BOS.

    Args:
        model, common: as in `InPlace`: losses, lora, end_token, bos_token.
    """

    method = "no_context"
    shared_arguments = InPlace.shared_arguments - {"window"}

    def __init__(self, model: PreTrainedModel, **common: Unpack[InPlaceOptions]) -> None:
        if unknown := sorted(common.keys() - self.arguments()):
            raise TypeError(f"{unknown[0]}: expected some of {', '.join(sorted(self.arguments()))}, got {unknown[0]}")
        super().__init__(model, ratio=1, layout={}, **common)

    @property
    def title(self) -> str:
        """What a table calls it."""
        return type(self).__name__

    def _input_rows(self, rows: Rows) -> Rows:
        return rows.columns(slice(1), (1,) * rows.batch_size)
