"""NoContext: what a model learns to answer without the context, to measure compressors against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.in_place import InPlace, kept_rows
from gistkit.compress.plans import InPlacePass
from gistkit.compress.tokens import Rows

if TYPE_CHECKING:
    from peft import LoraConfig


class NoContext(InPlace):
    """The No context baseline (Getting to the Gist of Gisting, Section 2), trained like the other methods.

    Text sees BOS and no context; its position ids begin behind BOS.

    Args:
        model, losses, lora, end_token, bos_token: as in `InPlace`.
    """

    method = "no_context"
    pooled = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        losses: Iterable[str] | Mapping[str, float] = ("qa",),
        lora: int | LoraConfig | None = 64,
        end_token: int | None = None,
        bos_token: int | None = None,
    ) -> None:
        super().__init__(
            model,
            ratio=1,
            layout={},
            options={},
            losses=losses,
            lora=lora,
            window=None,
            end_token=end_token,
            bos_token=bos_token,
        )

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
