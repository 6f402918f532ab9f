"""AvgPool: means of the context's activations, which the text reads in their place."""

from __future__ import annotations

from typing import Literal, Unpack

from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.fixed_layout import FixedLayout
from gistkit.compress.in_place import Common
from gistkit.compress.kept import PooledKeys
from gistkit.compress.plans import InPlacePass


class AvgPool(FixedLayout):
    """AvgPool (Getting to the Gist of Gisting, Section 4); with ratio 1 it is the model that reads the whole context.

    Text sees, in layer l, BOS and the means of what layer l is given for every `ratio` context tokens, at the mean of
    their position ids; no parameters but the model's.

    Args:
        ratio: context tokens a mean, a whole number >= 1; the last window may be shorter.
        pool: "hidden": means of hidden states, through the layer's norm and projections; "kv": means of keys, as they
            are before rotation, and of values.
        model, common: as in `InPlace`: losses, lora, window, end_token, bos_token.
    """

    method = "avgpool"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int = 5,
        pool: Literal["hidden", "kv"] = "hidden",
        **common: Unpack[Common],
    ) -> None:
        if pool not in ("hidden", "kv"):
            raise ValueError(f"pool: expected hidden or kv, got {pool!r}")
        super().__init__(
            model,
            ratio=ratio,
            layout={},
            options={"pool": pool},
            **common,
        )
        self.pool = pool

    @property
    def needs_projections(self) -> bool:
        """Whether keys are made of hidden states beside the pass."""
        return True

    def _keeper(self, batch: InPlacePass) -> hf.Keeper:
        positions = batch.positions[:, 1:].to(self.device)
        return PooledKeys(batch.context, batch.windows, positions, self.pool == "hidden", self.as_text)
