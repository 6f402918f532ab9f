"""500xCompressor: the memory tokens' keys and values at every layer are the memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gistkit.compress.chunks import ChunkCompressor
from gistkit.hf.keep import Layers


class FiveHundredX(ChunkCompressor):
    """500xCompressor (Li et al.), with the position layouts of Position IDs Matter. See `ChunkCompressor`.

    Keys keep the rotation of their encoder position ids; the decoder's tokens take theirs from the layout.
    """

    method = "x500"
    carrier = "kv"

    def _carried(self, hidden: Tensor, layers: Layers) -> dict[str, Any]:
        return {"layers": layers}
