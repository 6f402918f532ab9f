"""What learned position encodings prefer: BERT's position embeddings, and T5's biases (Position IDs Matter, 5.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# How the tables of transformers' models are called: BERT's and its kin's, GPT-2's, OPT's.
_TABLES = ("position_embeddings", "wpe", "embed_positions")


@torch.no_grad()
def position_similarity(model: nn.Module) -> Tensor:
    """Cosine similarity of the learned embeddings of any two positions of a model, such as a BERT or a GPT-2.

    Args:
        model: of transformers, with one table of position embeddings, or several of a model in parts, the first of
            which counts.

    Returns:
        float32 [P, P]; row p has the similarities of position p to all positions.

    Raises:
        TypeError: if it has none.

    Paper: Position IDs Matter, Figures 9 and 10.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES:
            rows = torch.nn.functional.normalize(module.weight.float(), dim=-1)
            return rows @ rows.T
    raise TypeError(
        f"model: expected one with learned position embeddings, such as a BERT, got {type(model).__name__} without a "
        f"module named {', '.join(_TABLES)}"
    )


@torch.no_grad()
def relative_bias(model: nn.Module, distances: int = 128) -> Tensor:
    """T5's bias on attention logits, by the distance of a key before the query.

    Args:
        model: a T5 of transformers, whose encoder's biases are taken, or those of a part of it.
        distances: number of distances, from 0 (the query's own position); at least 1.

    Returns:
        float32 [heads, distances].

    Raises:
        ValueError: if `distances` is out of range.
        TypeError: if the model has no such biases.

    Paper: Position IDs Matter, Figure 2.
    """
    if distances < 1:
        raise ValueError(f"distances: expected at least 1, got {distances}")
    for module in model.modules():
        if isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding):
            attention: Any = module
            # The last query's: of keys before it, the nearest last.
            bias: Tensor = attention.compute_bias(distances, distances)[0, :, -1].flip(-1).float()
            return bias
    raise TypeError(f"model: expected one with relative attention biases, such as a T5, got {type(model).__name__}")
