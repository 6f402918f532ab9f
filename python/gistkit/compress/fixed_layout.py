"""FixedLayout: in-place methods whose layout is decided by the length of the context alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.codec import draw_like
from gistkit.compress.in_place import GISTS, TEXT, InPlace, whole
from gistkit.compress.memory import Memory
from gistkit.compress.plans import Builder, InPlacePass, check_text, in_place_pass
from gistkit.compress.tokens import Rows
from gistkit.layouts import Role

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use


class FixedLayout(InPlace):
    """What Gist, AvgPool and GistPool share: one pass over [BOS][context][gists] under the method's layout.

    Args:
        ratio: context tokens a compressed token stands for, a whole number >= 1.
        layout: what the layout's builder takes beside context and ratio, by name.
        options: what else of its arguments a method has, by name.
        gists: gist embeddings, one for each place; None: one for all.
        model, common: as in `InPlace`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int,
        layout: Mapping[str, Any],
        options: Mapping[str, Any],
        gists: int | None = None,
        **common: Any,
    ) -> None:
        ratio = whole("ratio", ratio)
        self.gists = None if gists is None else whole("gists", gists)
        self.builder = Builder(self.method, ratio, tuple(sorted(layout.items())))
        # Options that the layout does not take are refused here rather than at the first context.
        check_text(self.method, self.builder(3 * ratio))
        super().__init__(model, ratio=ratio, options={**layout, **options}, **common)
        self.memory_embeddings = draw_like(self.embed, self.gists or 1) if self.has_gists else None

    @abstractmethod
    def _keeper(self, batch: InPlacePass) -> hf.Keeper:
        """What keeps [BOS][compressed tokens] of every layer of the pass."""

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """One pass over BOS, all contexts, and their gists where there are any."""
        read = self._read(self.behind_bos(rows))
        batch = self.pass_over(read)
        self.check_positions("input_ids", max(batch.starts) - 1)
        inputs = self.embed(read.ids)
        if self.memory_embeddings is not None:
            inputs = torch.cat([inputs, self._slots(max(batch.lengths) - 1, rows.batch_size).to(inputs.dtype)], 1)
        keep = self._keeper(batch)
        out = self.run(self._served(batch), inputs_embeds=inputs, plan=batch.plan, keep=keep)
        hidden = out.last_hidden_state
        memory = Memory(
            source=self.source,
            lengths=batch.lengths,
            context_lengths=rows.lengths,
            positions=batch.positions.clone(),
            starts=batch.starts,
            layers=keep.close(),
            last=hidden[torch.arange(rows.batch_size), batch.last_rows],
        )
        return memory, hidden[:, batch.gists]

    def pass_over(self, read: Rows) -> InPlacePass:
        """The plan of a pass over BOS and contexts, and what is kept of it."""
        lengths = tuple(length - 1 for length in read.lengths)
        return in_place_pass(self.builder, lengths, not self.has_gists, self.windows, str(self.device))

    def places(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """Places in the uncompressed order, gists and all: what position ids are where all tokens share a counter."""
        if not self._options.get("separate_positions"):
            return super().places(memory)
        places = torch.zeros(memory.positions.shape, dtype=torch.int64)
        behind = []
        for row, start in enumerate(memory.starts):
            # The context has the positions between BOS and the text.
            layout = self.builder(start - 1)
            kept = np.isin(layout.roles, (Role.BOS, Role.MEMORY))
            places[row, : int(kept.sum())] = torch.from_numpy(layout.ordinals[kept])
            behind.append(int(layout.ordinals[-1]))
        return places, tuple(behind)

    def _read(self, whole: Rows) -> Rows:
        """What is read of BOS and context."""
        return whole

    def _slots(self, count: int, rows: int) -> Tensor:
        embeddings: Any = self.memory_embeddings
        if self.gists is not None and count > self.gists:
            raise ValueError(
                f"input_ids: expected contexts of at most {self.gists} gists x {self.chunk} tokens, got {count} gists"
            )
        return (embeddings[:count] if self.gists is not None else embeddings.expand(count, -1)).expand(rows, -1, -1)

    def _served(self, batch: InPlacePass) -> Use:
        if not self.separate:
            return TEXT
        return {TEXT: slice(0, batch.gists.start), GISTS: batch.gists}


def kept_rows(batch: InPlacePass) -> hf.KeptKeys:
    """Keeps BOS and gists as attention made them."""
    rows = [0, *range(batch.gists.start, batch.gists.stop)]
    return hf.KeptKeys(torch.tensor(rows, device=batch.plan.spans.device))
