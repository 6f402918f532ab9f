"""AvgPool: the text reads means of the context's activations. NoContext: the text reads nothing of the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gistkit import hf, layouts, ops
from gistkit.common.checks import moved, placed
from gistkit.compress.config import register, setting
from gistkit.compress.memory import Memory
from gistkit.compress.methods.in_place import AsText, OnePass, OnePassConfig
from gistkit.compress.plans import InPlacePass
from gistkit.compress.tokens import Rows
from gistkit.hf.keep import LlamaRope, Rope, WithBos
from gistkit.layouts import Layout


@register("avgpool")
@dataclass(frozen=True, kw_only=True)
class AvgPoolConfig(OnePassConfig):
    """AvgPool (Getting to the Gist of Gisting, Section 4); with ratio 1 it is the model that reads the whole context.

    In layer l the text sees BOS and means of layer l's input over every `ratio` context tokens, at the mean of their
    position IDs. There are no parameters besides the model's, except for a soft prompt.

    Args:
        pool: "hidden": means of hidden states, through the layer's norm and projections; "kv": means of keys (before
            rotation) and of values.
        past: the means that `Compressive` keeps of its past, "hidden" or "kv" as in `pool`; None: as `pool`.
        soft_prompt: `Compressive` reads a learned embedding instead of BOS's (Dodo, Appendix B.3), initialised as
            BOS's. Nothing else uses it.
    """

    pool: Literal["hidden", "kv"] = setting("hidden", among=("hidden", "kv"))
    past: Literal["hidden", "kv"] | None = setting(None, among=("hidden", "kv", None), before="kv", in_memory=False)
    soft_prompt: bool = setting(False, before=False, in_memory=False)

    def check_model(self, model: nn.Module) -> None:
        if self.pool == "kv":
            hf.check_rotates(model)
        if "hidden" in (self.pool, self.past):
            hf.check_projects(model)
        super().check_model(model)

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        prompt = None
        if self.soft_prompt:
            start = embed(placed([self.bos_token], embed.weight.device)).detach()
            prompt = nn.Parameter(start.clone().float())
        return super().parts(embed) | {"soft_prompt": prompt}

    def layout(self, context: int) -> Layout:
        return layouts.avgpool(context, self.ratio, 1)

    def start(self, context: int) -> int:
        return 1 + context

    def kept(self, batch: InPlacePass, as_text: AsText) -> hf.Keeper:
        positions = moved(batch.positions[:, 1:], batch.plan.spans.device)
        return PooledKeys(batch.context, batch.windows, positions, self.pool == "hidden", as_text)


class AvgPool(OnePass, config=AvgPoolConfig):
    """AvgPool; arguments are those of `AvgPoolConfig` and `InPlaceConfig`."""

    options: AvgPoolConfig
    soft_prompt: nn.Parameter | None

    @property
    def past(self) -> str:
        """The means that `Compressive` keeps."""
        return self.options.past or self.options.pool


class PooledKeys(WithBos):
    """Keys and values of means over windows of the context (GistPool, Section 4).

    Args:
        rows: of the context.
        windows: int64 [W + 1] or [B, W + 1], the bounds of the windows among these rows.
        positions: int64 or float64 [W] or [B, W], position IDs of the pooled keys.
        of_hidden: means of a layer's input hidden states, through the layer's norm and projections; otherwise of the
            layer's values and of its keys as they are before rotation.
        as_text: see `AsText`.
    """

    def __init__(self, rows: slice, windows: Tensor, positions: Tensor, of_hidden: bool, as_text: AsText) -> None:
        super().__init__()
        self.rows, self.windows, self.positions = rows, windows, positions
        self.of_hidden, self.as_text = of_hidden, as_text

    def compressed(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        if self.of_hidden:
            means = ops.window_pool(before[:, self.rows], windows=self.windows)
            with self.as_text():
                return rope.project(layer, means, self.positions)
        key, value, positions = key[:, :, self.rows], value[:, :, self.rows], rope.positions[..., self.rows]
        return pooled_keys(key, value, positions, self.windows, self.positions, cast(LlamaRope, rope).inv_freq)


def pooled_keys(
    key: Tensor, value: Tensor, positions: Tensor, windows: Tensor, middle: Tensor, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    """Means over windows [W + 1] or [B, W + 1] of keys before rotation, at `middle`, and of values, [B, Hk, N, D] each.

    Args:
        positions: position IDs [N] or [B, N] of the keys.
        middle: those of the means.
        inv_freq: frequencies of the layer's RoPE.
    """
    # Keys carry RoPE's factor already: rotating them back and forth must not apply it twice.
    unrotated = ops.rerotate(key, -positions, inv_freq)
    return ops.window_pool(unrotated, value, windows=windows, positions=middle, inv_freq=inv_freq)


@register("no_context")
@dataclass(frozen=True, kw_only=True)
class NoContextConfig(OnePassConfig):
    """The No context baseline (Getting to the Gist of Gisting, Section 2), trained like the other methods.

    The text sees BOS and no context; its position IDs start after BOS.
    """

    any_ratio: ClassVar[bool] = False
    free: ClassVar[frozenset[str]] = frozenset()

    ratio: ClassVar[int] = 1  # type: ignore[misc]
    train_ratios: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc, assignment]
    window: ClassVar[None] = None  # type: ignore[misc, assignment]
    part: ClassVar[int] = 0  # type: ignore[misc, assignment]

    @property
    def title(self) -> str:
        return self.compressor.__name__

    @classmethod
    def sizes(cls, chunk: int, memory_tokens: int) -> dict[str, int]:
        return {}

    def layout(self, context: int) -> Layout:
        return layouts.no_context(1)

    def kept(self, batch: InPlacePass, as_text: AsText) -> hf.Keeper:
        return hf.KeptKeys(torch.zeros(1, dtype=torch.int64, device=batch.plan.spans.device))


class NoContext(OnePass, config=NoContextConfig):
    """The text without its context; arguments are those of `InPlaceConfig` but for ratio and window."""

    def size(self, context: int, ratio: int | None = None) -> int:
        """None: the memory is BOS."""
        return 0

    def parts_of(self, memory: Memory, context: int) -> NDArray[np.int64]:
        return np.zeros((0, 2), np.int64)

    def _read_by_pass(self, rows: Rows) -> Rows:
        return rows.columns(slice(1), (1,) * rows.batch_size)
