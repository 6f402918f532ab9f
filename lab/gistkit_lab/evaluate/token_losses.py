"""How well each token of a context is reconstructed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gistkit.compress import Compressor
from gistkit.evaluate.runner import evaluating, scored_tokens


def token_losses(compressor: Compressor, contexts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The reconstruction loss of every token of each context, from its memory and the true tokens before.

    Their mean is the autoencoding loss of a compressor without `end_token`. `gistkit_lab.viz.text_html` shades a text
    by them.

    Args:
        compressor: a compressor, or another reader that `evaluate` takes.
        contexts: token ids, one list a text; all are compressed in one batch.

    Returns:
        Losses in nats, one a token; for a compressor with a window, only of the compressed tokens.

    Raises:
        TypeError: if the contexts are not lists of token ids.
    """
    if any(isinstance(context, str) for context in contexts):
        raise TypeError("contexts: expected lists of token ids, one a text, got strings")
    rows = [torch.as_tensor(context).tolist() for context in contexts]
    if any(isinstance(row, int) for row in rows):
        raise TypeError("contexts: expected lists of token ids, one a text, got single ids")
    with evaluating(compressor):
        memory = compressor.encode(rows)
        compressed = [row[:length] for row, length in zip(rows, memory.context_lengths, strict=True)]
        return [nats.tolist() for nats, _ in scored_tokens(compressor, memory, "ae", compressed)]
