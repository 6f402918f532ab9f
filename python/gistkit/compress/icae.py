"""ICAE: the encoder's last-layer outputs at the memory tokens become input embeddings of the decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gistkit.compress.chunks import ChunkCompressor
from gistkit.hf.keep import Layers


class ICAE(ChunkCompressor):
    """In-context autoencoder (Ge et al.), with the position layouts of Position IDs Matter. See `ChunkCompressor`."""

    method = "icae"
    carrier = "embedding"

    def _carried(self, hidden: Tensor, layers: Layers) -> dict[str, Any]:
        # Without gradients a copy, for a view would keep the hidden states of the context alive.
        return {"embeddings": hidden if torch.is_grad_enabled() else hidden.clone()}
