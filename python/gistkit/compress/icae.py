"""ICAE: the encoder's last-layer outputs at the memory tokens become input embeddings of the decoder."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicCache

from gistkit.compress.base import Compressor
from gistkit.compress.memory import Memory


class ICAE(Compressor):
    """In-context autoencoder (Ge et al.), with the position layouts of Position IDs Matter. See `Compressor`."""

    carrier = "embedding"

    def _memory(self, hidden: Tensor, cache: DynamicCache | None, context: int, tokens: int) -> Memory:
        hidden = hidden[:, hidden.shape[1] - tokens :]
        return Memory(self.source, context, hidden, embeddings=hidden)

    def _prefix(self, memory: Memory) -> tuple[Tensor | None, DynamicCache | None]:
        return memory.embeddings, None
