"""Attention of a compressor's memory tokens over the context."""

from __future__ import annotations

import torch
from torch import Tensor

from gistkit.compress import Compressor
from gistkit.inspect import AttentionRecorder


@torch.no_grad()
def memory_attention(compressor: Compressor, chunks: Tensor) -> list[Tensor]:
    """Attention of the memory tokens over one chunk of context: for each layer [M, L], mean over rows and heads.

    Args:
        compressor: a compressor whose model is attached.
        chunks: int64 [B, L], contexts of a single chunk.
    """
    length = chunks.shape[1]
    # In physical order the memory tokens follow the context.
    with AttentionRecorder(rows=slice(length, None), reduce="mean") as recorder:
        compressor.encode(chunks)
    return [layer_map.weights[:, 0, :, :length].mean(0) for layer_map in recorder.maps]
