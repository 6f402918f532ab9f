"""SAC: anchors, marked tokens of the context itself, carry the memory of their chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gistkit import hf, layouts
from gistkit.common.checks import padded
from gistkit.compress.config import register, setting
from gistkit.compress.memory import Memory
from gistkit.compress.methods.icae import ENCODER, ChunkCompressor, FiveHundredXConfig
from gistkit.compress.plans import Places, compiled
from gistkit.compress.tokens import Rows
from gistkit.layouts import Plan
from gistkit.layouts.sac import anchors

# Spread of the marks at the start, that of the released code.
SPREAD = 0.02


@register("sac")
@dataclass(frozen=True, kw_only=True)
class SACConfig(FiveHundredXConfig):
    """Semantic-Anchor Compression (Liu et al., arXiv 2510.08907), by 500xCompressor's decoder with EPL.

    Args:
        losses: as in `Config`; the paper reconstructs nothing ("lm", then "qa").
        ratio: tokens of a chunk for each anchor, a whole number that divides `chunk`.
        layout: only "epl": every token keeps the position ID of the uncompressed sequence.
    """

    allowed_losses: ClassVar[tuple[str, ...]] = ("ae", "lm", "qa", "kl", "reverse_kl", "hidden")
    joint_head: ClassVar[bool] = False  # type: ignore[misc]

    losses: Iterable[str] | Mapping[str, float] = setting(("lm",), in_memory=False)
    layout: str = setting("epl", among=("epl",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio != int(self.ratio):
            raise ValueError(f"ratio: expected a whole number, as anchors are tokens, got {self.ratio:g}")

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        weight = embed.weight
        marks = SPREAD * torch.randn(self.memory_tokens, weight.shape[1], device=weight.device)
        return super().parts(embed) | {"memory_embeddings": nn.Parameter(marks)}


class SAC(ChunkCompressor, config=SACConfig):
    """SAC; arguments are those of `SACConfig` and `ChunkConfig`.

    A learned mark is added to the embedding of each anchor, every `ratio`-th token of a chunk. All tokens of a chunk
    see each other, with the encoder's adapter, and the memory keeps the anchors' keys and values of every layer.
    """

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor | None]:
        self.lm.check_positions("input_ids", max(rows.lengths))
        ratio = int(self.options.ratio)
        found = [anchors(length, self.chunk, ratio) for length in rows.lengths]
        lengths = tuple(map(len, found))
        index = padded([each.tolist() for each in found])
        valid = torch.arange(index.shape[1]) < torch.tensor(lengths)[:, None]
        own, valid_here = index.to(self.device), valid.to(self.device)[..., None]
        inputs = self.lm.embedded(ENCODER, rows.ids)
        marks = self.memory_embeddings.to(inputs)[own % self.chunk // ratio].masked_fill(~valid_here, 0)
        keep = hf.KeptKeys(own)
        self.lm.run(
            ENCODER,
            inputs_embeds=inputs.scatter_add(1, own[..., None].expand_as(marks), marks),
            plan=_plan(rows.lengths, self.chunk, ratio, self.lm.windows, str(self.device)),
            keep=keep,
        )
        positions, last = (index + 1).where(valid, 0), max(rows.lengths)
        places = Places(lengths=lengths, positions=positions, starts=rows.lengths, last=last)
        return self.remember(places, rows, layers=keep.close()), None

    def kept_tokens(self, memory: Memory) -> list[int]:
        return (memory.positions[0, : memory.lengths[0]] - 1).tolist()  # type: ignore[no-any-return]

    def size(self, context: int, ratio: int | None = None) -> int:
        own = int(self.options.ratio)
        whole, rest = divmod(context, self.chunk)
        return whole * self.memory_tokens + (len(anchors(rest, self.chunk, own)) if rest else 0)

    def parts_of(self, memory: Memory, context: int) -> NDArray[np.int64]:
        """See `Compressor.parts_of`: an anchor stands for the `ratio` tokens around it, in its chunk."""
        ratio = int(self.options.ratio)
        places = anchors(context, self.chunk, ratio)
        starts = places - places % self.chunk % ratio
        # Tokens after a chunk's last window of several have no anchor of their own.
        return np.stack([starts, np.append(starts[1:], context)], -1)


@lru_cache(maxsize=64)
def _plan(contexts: tuple[int, ...], chunk: int, ratio: int, windows: tuple[int, ...], device: str) -> Plan:
    """The pass in the order of the text, for rows of these lengths."""
    made = {context: layouts.sac(context, chunk, ratio) for context in {*contexts}}
    return compiled([made[context] for context in contexts], windows, device, grouped=False)
