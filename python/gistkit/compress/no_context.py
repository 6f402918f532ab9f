"""NoContext: what a model learns to answer without the context, to measure compressors against."""

from __future__ import annotations

from typing import Any, Unpack

from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.fixed_layout import FixedLayout, kept_rows
from gistkit.compress.in_place import Common
from gistkit.compress.plans import InPlacePass
from gistkit.compress.tokens import Rows


class NoContext(FixedLayout):
    """The No context baseline (Getting to the Gist of Gisting, Section 2), trained like the other methods.

    Text sees BOS and no context; its position ids begin behind BOS.

    Args:
        model, common: as in `InPlace`: losses, lora, end_token, bos_token.
    """

    method = "no_context"

    def __init__(self, model: PreTrainedModel, **common: Unpack[Common]) -> None:
        if unknown := sorted(common.keys() - self.arguments()):
            raise TypeError(f"{unknown[0]}: expected some of {', '.join(sorted(self.arguments()))}, got {unknown[0]}")
        super().__init__(model, ratio=1, layout={}, options={}, **common)

    @classmethod
    def arguments(cls) -> set[str]:
        """The keyword arguments that make one around a model."""
        return super().arguments() - {"ratio", "window"}

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that made it, but `lora`; JSON values."""
        return {name: value for name, value in super().settings.items() if name not in ("ratio", "window")}

    @property
    def title(self) -> str:
        """What a table calls it."""
        return type(self).__name__

    def _read(self, whole: Rows) -> Rows:
        return Rows(whole.ids[:, :1], (1,) * whole.batch_size)

    def _keeper(self, batch: InPlacePass) -> hf.Keeper:
        return kept_rows(batch)
