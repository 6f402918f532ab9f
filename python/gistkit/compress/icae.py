"""ICAE: the encoder's last-layer outputs at the memory tokens become input embeddings of the decoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gistkit import hf
from gistkit.compress.base import Compressor


class ICAE(Compressor):
    """In-context autoencoder (Ge et al.), with the position layouts of Position IDs Matter. See `Compressor`."""

    method = "icae"
    carrier = "embedding"

    def _carried(self, hidden: Tensor, keep: hf.KeptKeys | None) -> dict[str, Any]:
        return {"embeddings": hidden}
