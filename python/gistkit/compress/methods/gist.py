"""Gist and GistPool: learned memory tokens, the gists, read the context, and the text reads only the gists."""

from __future__ import annotations

from typing import Unpack

from transformers import PreTrainedModel

from gistkit.compress.methods.in_place import InPlace, InPlaceOptions


class Gist(InPlace):
    """Gist (Mu et al.) at a fixed ratio; OffsetGist, SepGist and SepOffsetGist (GistPool, Sections 2, 5.1 and 5.2).

    Args:
        ratio: context tokens a gist stands for, a whole number >= 1; ceil(n / ratio) gists follow n context tokens.
        offset: in layer l the text reads what leaves layer l at the gists, instead of what enters it.
        separate, full_copy, copy_norms: gists have their own parameters, as in `InPlace`.
        separate_positions: gists have their own counter of position ids, and other tokens do not count them.
        gists: number of gist embeddings, one for each gist, which is the most there can be; None: one for all (Table
            5).
        model, common: as in `InPlace`: losses, lora, window, end_token, bos_token.
    """

    method = "gist"
    has_gists = True

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
        copy_norms: bool = False,
        separate_positions: bool = False,
        gists: int | None = None,
        **common: Unpack[InPlaceOptions],
    ) -> None:
        super().__init__(
            model,
            ratio=ratio,
            layout={"separate_positions": separate_positions},
            offset=offset,
            separate=separate,
            full_copy=full_copy,
            copy_norms=copy_norms,
            gists=gists,
            **common,
        )


class GistPool(InPlace):
    """GistPool (Getting to the Gist of Gisting, Section 5.3), with the variants of Table 10.

    Args:
        ratio: context tokens in a window, a whole number >= 1; n context tokens have ceil(n / ratio) gists.
        windows: number of windows that a gist sees, its own and those before it; None: all up to its own.
        memory_sees_memory, memory_sees_itself, memory_sees_bos, context_sees_memory, separate_positions: as in
            `gistkit.layouts.gistpool`.
        offset: in layer l the text reads what leaves layer l at the gists, instead of what enters it.
        separate, full_copy, copy_norms: gists have their own parameters, as in `InPlace`; `start_as_means` needs a
            full copy.
        gists: number of gist embeddings, one for each gist, which is the most there can be; None: one for all (Table
            5).
        model, common: as in `InPlace`: losses, lora, window, end_token, bos_token.
    """

    method = "gistpool"
    has_gists = True

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
        copy_norms: bool = False,
        gists: int | None = None,
        **common: Unpack[InPlaceOptions],
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
            copy_norms=copy_norms,
            gists=gists,
            **common,
        )
