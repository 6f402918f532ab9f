"""500xCompressor: the memory tokens' keys and values at every layer are the memory."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import DynamicCache

from gistkit.compress.base import Compressor
from gistkit.compress.memory import Memory


class FiveHundredX(Compressor):
    """500xCompressor (Li et al.), with the position layouts of Position IDs Matter. See `Compressor`.

    Keys keep the rotation of their encoder position ids; the decoder's tokens take theirs from the layout.
    """

    carrier = "kv"

    def _memory(self, hidden: Tensor, cache: DynamicCache | None, context: int, tokens: int) -> Memory:
        if cache is None:
            raise RuntimeError("the encoder returned no cache; expected one with use_cache=True")
        first = hidden.shape[1] - tokens
        held = cast(Any, cache).layers
        layers = tuple((layer.keys[:, :, first:], layer.values[:, :, first:]) for layer in held)
        return Memory(self.source, context, hidden[:, first:], layers=layers)

    def _prefix(self, memory: Memory) -> tuple[Tensor | None, DynamicCache | None]:
        # A cache of its own for every decode: the memory itself never grows.
        cache = DynamicCache(config=self.model.config)
        for index, (key, value) in enumerate(memory.layers or ()):
            cache.update(key, value, index)
        return None, cache
