"""Memory: what a compressed context leaves behind for the decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """The compressed context of a batch; decoding from it leaves it unchanged.

    Args:
        source: what made it, (carrier, chunk, memory tokens a chunk, layout): only its like can read it.
        context_length: number of tokens p of the original context, the same in every row.
        embeddings: [B, kM, hidden] for k chunks of M memory tokens, where a method carries embeddings (ICAE).
        layers: per layer (key, value), each [B, heads, kM, head_dim], keys rotated at their encoder position ids,
            where a method carries the cache (500xCompressor).
        hidden: [B, kM, hidden], the encoder's output at the memory tokens, kept for the compression loss.
    """

    source: tuple[str, int, int, str]
    context_length: int
    hidden: Tensor
    embeddings: Tensor | None = None
    layers: tuple[tuple[Tensor, Tensor], ...] | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.hidden.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of memory tokens kM of a row."""
        return self.hidden.shape[1]
