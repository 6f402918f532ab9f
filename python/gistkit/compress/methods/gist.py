"""Gist and GistPool: learned memory tokens (gists) read the context, and the text reads only the gists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gistkit import hf, layouts
from gistkit.common.checks import placed
from gistkit.compress.config import draw_like, register, setting
from gistkit.compress.losses import LOSSES
from gistkit.compress.methods.in_place import AsText, OnePass, OnePassConfig
from gistkit.compress.plans import InPlacePass
from gistkit.hf.keep import Rope, WithBos
from gistkit.layouts import Layout


@dataclass(frozen=True, kw_only=True)
class GistsConfig(OnePassConfig):
    """Arguments of methods with gists, besides those of `InPlaceConfig`.

    Args:
        offset: compute the gists' keys and values of layer l from the layer's output at the gists, not from its input
            (the paper's offset).
        separate: gists have their own parameters.
        full_copy: with `separate`, the gists' parameters are a full copy of the layers' linear maps, also with `lora`.
        copy_norms: a full copy also has its own norms, so that gists and text share no parameter of a layer, as in the
            paper. False: they share the norms.
        gists: number of gist embeddings, one per gist, and so the largest number of gists; None: one embedding for all
            (GistPool paper, Table 5).
    """

    has_gists: ClassVar[bool] = True
    allowed_losses: ClassVar[tuple[str, ...]] = LOSSES

    offset: bool = False
    separate: bool = False
    full_copy: bool = setting(False, before=False)
    copy_norms: bool = setting(False, before=False)
    gists: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_copy and not self.separate:
            raise ValueError("full_copy: expected separate=True with it, got separate=False")
        if self.copy_norms and not self.copied:
            raise ValueError(
                "copy_norms: expected gists with copied maps (full_copy=True, or separate=True without lora), got "
                "none; with LoRA, train_norms gives gists their own norms"
            )

    def check_model(self, model: nn.Module) -> None:
        if self.offset:
            hf.check_projects(model)
        super().check_model(model)

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        return super().parts(embed) | {"memory_embeddings": draw_like(embed, self.gists or 1)}

    def kept(self, batch: InPlacePass, as_text: AsText) -> hf.Keeper:
        if self.offset:
            return OffsetKeys(batch.gists, as_text)
        rows = [0, *range(batch.gists.start, batch.gists.stop)]
        return hf.KeptKeys(placed(rows, batch.plan.spans.device))


def behind_gists(config: OnePassConfig, context: int) -> int:
    """`OnePassConfig.start` with a gist for each window, wherever they are."""
    return 1 + context + (0 if config.separate_positions else -(-context // config.ratio))


class OffsetKeys(WithBos):
    """Keys and values of layer l from the gists' OUTPUT of layer l, with the text's norm and projections of the layer.

    The last layer's output is taken before the model's final norm; BOS is not offset (GistPool, Section 5.1, Figure 3).

    Args:
        rows: of the gists.
        as_text: see `AsText`.
    """

    def __init__(self, rows: slice, as_text: AsText) -> None:
        super().__init__()
        self.rows, self.as_text = rows, as_text

    def compressed(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        with self.as_text():
            return rope.project(layer, after[:, self.rows], rope.positions[..., self.rows])


@register("gist")
@dataclass(frozen=True, kw_only=True)
class GistConfig(GistsConfig):
    """Gist (Mu et al.) at a fixed ratio; OffsetGist, SepGist and SepOffsetGist (GistPool, Sections 2, 5.1 and 5.2).

    Args:
        separate_positions: gists have their own position counter, and other tokens are counted without them.
    """

    separate_positions: bool = False

    @property
    def title(self) -> str:
        """The paper's name of the variant, and the ratio."""
        return f"{'Sep' * self.separate}{'Offset' * self.offset}Gist {self.ratio}x"

    def layout(self, context: int) -> Layout:
        return layouts.gist(context, self.ratio, 1, separate_positions=self.separate_positions)

    start = behind_gists

    def gist_ordinals(self, context: int) -> NDArray[np.int64]:
        return 1 + context + np.arange(-(-context // self.ratio))


class Gist(OnePass, config=GistConfig):
    """Gist and its variants; arguments are those of `GistConfig`, `GistsConfig` and `InPlaceConfig`."""


@register("gistpool")
@dataclass(frozen=True, kw_only=True)
class GistPoolConfig(GistsConfig):
    """GistPool (Getting to the Gist of Gisting, Section 5.3), with the variants of Table 10.

    Args:
        windows: number of windows that a gist sees, its own and those before it; None: all up to its own.
        memory_sees_memory, memory_sees_itself, memory_sees_bos, context_sees_memory, separate_positions: as in
            `gistkit.layouts.gistpool`.
        offset, separate: as in `GistsConfig`; `start_as_means` needs a full copy.
    """

    offset: bool = True
    separate: bool = True
    windows: int | None = setting(5, least=1)
    memory_sees_memory: bool = False
    memory_sees_itself: bool = True
    memory_sees_bos: bool = True
    context_sees_memory: bool = False
    separate_positions: bool = False

    def layout(self, context: int) -> Layout:
        return layouts.gistpool(
            context,
            self.ratio,
            1,
            windows=self.windows,
            memory_sees_memory=self.memory_sees_memory,
            memory_sees_itself=self.memory_sees_itself,
            memory_sees_bos=self.memory_sees_bos,
            context_sees_memory=self.context_sees_memory,
            separate_positions=self.separate_positions,
        )

    start = behind_gists

    def gist_ordinals(self, context: int) -> NDArray[np.int64]:
        gists = 1 + np.arange(-(-context // self.ratio))
        return np.minimum(gists * self.ratio, context) + gists


class GistPool(OnePass, config=GistPoolConfig):
    """GistPool and its variants; arguments are those of `GistPoolConfig`, `GistsConfig` and `InPlaceConfig`."""
