"""ViT: an image classifier whose position encoding is an argument."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit.layouts.causal import full_plan
from gistkit.nn.models.block import Block, Pass, check_position
from gistkit.nn.positions import PositionEncoding, grid_positions


class ViT(nn.Module):
    """A vision transformer on gistkit's attention (arXiv 2010.11929): patches, a [CLS] token, LayerNorm, gelu.

    Args:
        patch: side of a patch in pixels.
        channels: of images.
        classes: number of classes.
        dim: width, a multiple of `heads`.
        layers: number of layers.
        heads: of attention.
        position: the position encoding, with 2 axes and 1 extra token, [CLS]; its parameters are not initialised again.
        hidden_dim: of the feed-forward networks; None: 4 dim.
        dropout: of embeddings, and of what attention and feed-forward networks add.
        attention_dropout: of attention's weights; see `Block`.
        drop_path: of the last layer, see `Block`; it grows linearly from 0 in the first.
    """

    def __init__(
        self,
        patch: int,
        channels: int,
        classes: int,
        dim: int,
        layers: int,
        heads: int,
        position: PositionEncoding,
        *,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        check_position(position, axes=2, extra_tokens=1, layers=layers)
        self.patch, self.channels = patch, channels
        self.patches = nn.Linear(channels * patch * patch, dim)
        self.cls = nn.Parameter(0.02 * torch.randn(dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                dim, heads, layer, style="vit", hidden_dim=hidden_dim, dropout=dropout,
                attention_dropout=attention_dropout, drop_path=drop_path * layer / max(layers - 1, 1),
            )
            for layer in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self.position = position

    def forward(self, images: Tensor, positions: Tensor | None = None, *, embeddings: Tensor | None = None) -> Tensor:
        """Logits [B, classes].

        Args:
            images: [B, channels, height, width], with sides that are multiples of the patch's.
            positions: [N, 2] or [B, N, 2], (row, column) of each patch in row-major order; None: from (0, 0).
            embeddings: [N, out_dim] or [B, N, out_dim], SeqPE's outputs at `positions`, if already computed.
        """
        if images.dim() != 4 or images.shape[1] != self.channels or any(s % self.patch for s in images.shape[2:]):
            raise ValueError(
                f"images: expected [B, {self.channels}, height, width] with sides that are multiples of {self.patch}, "
                f"got shape {tuple(images.shape)}"
            )
        height, width = (side // self.patch for side in images.shape[2:])
        count = height * width
        if positions is None:
            positions = grid_positions(height, width, device="cpu" if self.position.on_host else images.device)
        elif positions.dim() not in (2, 3) or positions.shape[-2:] != (count, 2):
            raise ValueError(f"positions: expected [{count}, 2] or [B, {count}, 2], got shape {tuple(positions.shape)}")
        patches = self.patches(F.unfold(images, self.patch, stride=self.patch).transpose(1, 2))
        hidden = torch.cat([self.cls.to(patches.dtype).expand(len(images), 1, -1), patches], 1)
        hidden = self.dropout(self.position.embed(hidden, positions))
        prepared = self.position.prepare(positions, embeddings)
        plan = full_plan(1 + count, images.device)
        key_bias = self.position.key_bias(positions, torch.promote_types(hidden.dtype, torch.float32))
        shared = Pass(self.position, prepared, plan, key_bias)
        for block in self.blocks:
            hidden = block(hidden, shared)
        return cast(Tensor, self.head(self.norm(hidden[:, 0])))
