"""KV-Distill: a scorer selects tokens, the selected ones alone have an adapter, and the base model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
from torch import Tensor

from gistkit import hf, layouts
from gistkit.common.checks import placed
from gistkit.compress.config import register, setting
from gistkit.compress.methods.dodo import Dodo, DodoConfig
from gistkit.compress.methods.in_place import GISTS
from gistkit.compress.tokens import Rows
from gistkit.hf.keep import Layers
from gistkit.layouts.dodo import nuggets_of
from gistkit.nn import Nuggets


@register("kv_distill")
@dataclass(frozen=True, kw_only=True)
class KVDistillConfig(DodoConfig):
    """KV-Distill (Chari, Qin and Van Durme, arXiv 2503.10337), by Dodo's selection and means.

    Args:
        losses: as in `Config`. By default the teacher is the base model with the full context, in both directions.
        lora: as in `DodoConfig`, of the selected tokens; it cannot be None.
    """

    losses: Iterable[str] | Mapping[str, float] = setting(("kl", "reverse_kl"), in_memory=False)
    separate: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is None:
            raise ValueError(
                "lora: expected a rank or a peft.LoraConfig, because the base model stays frozen, got None"
            )

    @property
    def roles(self) -> tuple[str, ...]:
        return (GISTS,)

    @property
    def title(self) -> str:
        return super().title.replace("Dodo", "KV-Distill")


class KVDistill(Dodo, config=KVDistillConfig):
    """KV-Distill; arguments are those of `KVDistillConfig` and `DodoConfig`.

    After the selection BOS and the context are read again: selected tokens with the adapter, all others without, in
    one pass. Text reads the keys and values of BOS and of the selected tokens without any adapter.
    """

    options: KVDistillConfig
    reader = None
    adapts_some = True

    def read_nuggets(self, input_rows: Rows, nuggets: Nuggets) -> tuple[Tensor, Layers]:
        """See `Dodo.read_nuggets`; the selected tokens stand after the others in the pass."""
        parts = []
        for length, places, count in zip(input_rows.lengths, nuggets.index.tolist(), nuggets.counts, strict=True):
            selected = np.isin(np.arange(length), places[:count])
            parts.append(layouts.dodo(selected, length, bos=True))
        plan = layouts.compile_batch(parts, aligned=True, windows=self.lm.windows, device=self.device)
        rows = nuggets_of(plan)
        kept = placed([0, *range(rows.start, rows.stop)], self.device)
        use, keep = {GISTS: rows}, hf.KeptKeys(kept)
        # What fills rows up is seen by nothing.
        order = cast(Tensor, plan.order).clamp(max=input_rows.ids.shape[1] - 1)
        inputs = self.lm.embedded(use, input_rows.ids.gather(1, order))
        states = self.lm.run(use, inputs_embeds=inputs, plan=plan, keep=keep).last_hidden_state
        return states[:, kept], keep.close()
