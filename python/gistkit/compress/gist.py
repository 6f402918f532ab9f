"""Gist: memory tokens after the context summarise it, and the text sees those alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.fixed_layout import FixedLayout, kept_rows
from gistkit.compress.in_place import Common
from gistkit.compress.kept import OffsetKeys
from gistkit.compress.plans import InPlacePass


class WithGists(FixedLayout):
    """What compressors whose gists are tokens of the pass share; see `InPlace`.

    Args:
        offset: text sees, in layer l, what layer l made at the gists, rather than what it was given there.
        model, layout, separate, full_copy, gists, common: as in `FixedLayout` and `InPlace`.
    """

    has_gists = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: Mapping[str, Any],
        offset: bool,
        separate: bool,
        full_copy: bool = False,
        gists: int | None,
        **common: Any,
    ) -> None:
        self.offset = offset
        options = {"offset": offset, "separate": separate, "gists": gists}
        # A method may do without this choice.
        if "full_copy" in self.arguments():
            options["full_copy"] = full_copy
        super().__init__(
            model, layout=layout, options=options, gists=gists, separate=separate, full_copy=full_copy, **common
        )

    @property
    def needs_projections(self) -> bool:
        """Whether keys are made of hidden states beside the pass."""
        return self.offset

    def _keeper(self, batch: InPlacePass) -> hf.Keeper:
        return OffsetKeys(batch.gists, self.as_text) if self.offset else kept_rows(batch)


class Gist(WithGists):
    """Gist (Mu et al.) at a fixed ratio; OffsetGist, SepGist and SepOffsetGist (GistPool, Sections 2, 5.1 and 5.2).

    Args:
        ratio: context tokens a gist, a whole number >= 1; there are ceil(n / ratio) gists after n context tokens.
        offset: text sees, in layer l, what layer l made at the gists, rather than what it was given there.
        separate, full_copy: gists have parameters of their own, as in `InPlace`.
        separate_positions: gists have a counter of position ids of their own, and do not count for other tokens.
        gists: embeddings of gists, one for each place, which bounds their number; None: one for all (Table 5).
        model, common: as in `InPlace`: losses, lora, window, end_token, bos_token.
    """

    method = "gist"

    @property
    def title(self) -> str:
        """The paper's name of the variant, and the ratio."""
        return f"{'Sep' * self.separate}{'Offset' * self.offset}Gist {self.chunk}x"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int = 5,
        offset: bool = False,
        separate: bool = False,
        full_copy: bool = False,
        separate_positions: bool = False,
        gists: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            model,
            ratio=ratio,
            layout={"separate_positions": separate_positions},
            offset=offset,
            separate=separate,
            full_copy=full_copy,
            gists=gists,
            **common,
        )
