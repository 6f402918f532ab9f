"""LanguageModel: a compressor as a language model that reads recent tokens whole and less of what came before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from gistkit.compress.in_place import InPlace
from gistkit.compress.losses import token_loss
from gistkit.compress.streaming import Stream, generate
from gistkit.compress.tokens import IGNORE, Rows
from gistkit.layouts import Plan
from gistkit.layouts.dodo import check_segment


class LanguageModel(ABC):
    """Reads on with its recent tokens as they are, and of the past what a subclass keeps.

    All parameters are the compressor's.

    Args:
        compressor: whose model, adapters and BOS serve.
        tau, segment: see `gistkit.layouts.dodo`.
    """

    def __init__(self, compressor: InPlace, tau: int, segment: int) -> None:
        self.compressor = compressor
        self.tau, self.segment = check_segment(tau, segment)

    @property
    def title(self) -> str:
        """What a table calls it."""
        return f"{self.compressor.title}, tau {self.tau}"

    @property
    def settings(self) -> dict[str, Any]:
        """What decides its losses beside parameters and text; JSON values."""
        return self.compressor.settings | {"tau": self.tau, "segment": self.segment}

    def first(self, position: int) -> int:
        """Where what a token at `position` sees uncompressed begins; the same for all tokens of a segment."""
        return max(0, position // self.segment * self.segment - (self.tau - self.segment))

    @abstractmethod
    def hidden(self, read: Rows) -> Tensor:
        """Hidden states [B, N, d] at each token of rows behind BOS, from one pass."""

    @abstractmethod
    def states(self, read: Rows) -> Tensor:
        """int64 [B, N]: how many states each token of rows behind BOS sees in a layer, its own included."""

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> dict[str, Tensor]:
        """{"loss": nats a token} of texts, each token after BOS predicted from those before it (Equation 11).

        Args:
            input_ids, attention_mask: as in `Compressor.encode`.
        """
        its = self.compressor
        its.refuse_foreign_checkpointing()
        read = self.rows(input_ids, attention_mask)
        hidden = self.hidden(read)
        targets = read.ids.where(read.valid, IGNORE)[:, 1:]
        return {"loss": token_loss(its.readout(hidden[:, :-1]), targets=targets, **its.output_embedding)}

    def start(self, input_ids: Any, attention_mask: Any = None) -> Stream:
        """Reads texts in one pass, and is ready to read on token by token; see `gistkit.compress.streaming.Stream`."""
        return self._start(self.rows(input_ids, attention_mask))

    def generate(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> Tensor:
        """Tokens that follow the texts; see `gistkit.compress.streaming.generate`."""
        return generate(self, input_ids, attention_mask, **options)

    @abstractmethod
    def _start(self, read: Rows) -> Stream:
        """A stream behind rows that are checked."""

    def rows(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """Texts as users have them, checked, behind BOS; of at least one token beside it."""
        its = self.compressor
        read = its.behind_bos(its.contexts(input_ids, attention_mask, shortest=1))
        its.check_positions("input_ids", max(read.lengths) - 1)
        return read


def keys_seen(plan: Plan) -> Tensor:
    """int64 [B, Nq]: how many keys each query of a plan sees."""
    return (plan.spans[..., 1] - plan.spans[..., 0]).sum(-1).long()
