"""GistPool: one gist after each window of the context, which pools that window and a few before."""

from __future__ import annotations

from typing import Unpack

from transformers import PreTrainedModel

from gistkit.compress.gist import WithGists
from gistkit.compress.in_place import Common


class GistPool(WithGists):
    """GistPool (Getting to the Gist of Gisting, Section 5.3), with the variants of Table 10.

    Args:
        ratio: context tokens a window, a whole number >= 1; there are ceil(n / ratio) gists among n context tokens.
        windows: windows a gist sees, its own and those before; None: all up to its own.
        memory_sees_memory, memory_sees_itself, memory_sees_bos, context_sees_memory, separate_positions: as in
            `gistkit.layouts.gistpool`.
        offset: text sees, in layer l, what layer l made at the gists, rather than what it was given there.
        separate, full_copy: gists have parameters of their own, as in `InPlace`; `start_as_means` needs a copy.
        gists: embeddings of gists, one for each place, which bounds their number; None: one for all (Table 5).
        model, common: as in `InPlace`: losses, lora, window, end_token, bos_token.
    """

    method = "gistpool"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int = 5,
        windows: int | None = 5,
        memory_sees_memory: bool = False,
        memory_sees_itself: bool = True,
        memory_sees_bos: bool = True,
        context_sees_memory: bool = False,
        separate_positions: bool = False,
        offset: bool = True,
        separate: bool = True,
        full_copy: bool = False,
        gists: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            model,
            ratio=ratio,
            layout={
                "windows": windows,
                "memory_sees_memory": memory_sees_memory,
                "memory_sees_itself": memory_sees_itself,
                "memory_sees_bos": memory_sees_bos,
                "context_sees_memory": context_sees_memory,
                "separate_positions": separate_positions,
            },
            offset=offset,
            separate=separate,
            full_copy=full_copy,
            gists=gists,
            **common,
        )
