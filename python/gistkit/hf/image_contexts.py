"""join_contexts: texts with images that a processor made one at a time, as one batch for a VoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gistkit.common.checks import IGNORE, padded

TOKENS, MASK = "input_ids", "attention_mask"


def join_contexts(contexts: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Contexts as `VoCo.encode` takes them: tokens padded with 0 under a mask, and images one after another.

    Args:
        contexts: each what the model's own processor returned for one text with images, see `VoCo.split`.

    Raises:
        ValueError: if one has several rows, or images that others have not.
    """
    ids = padded([_tokens(context) for context in contexts], IGNORE)
    batch = {TOKENS: ids.clamp(min=0), MASK: (ids != IGNORE).long()}
    # What processors add for each token follows from the tokens.
    names = [{name for name in context if name not in batch and not name.endswith("token_type_ids")}
             for context in contexts]  # fmt: skip
    if any(other != names[0] for other in names):
        raise ValueError(f"context: expected {', '.join(sorted(names[0]))} in every row, got other names in some")
    return batch | {
        name: _joined([torch.as_tensor(context[name]) for context in contexts]) for name in sorted(names[0])
    }


def _tokens(context: Mapping[str, Any]) -> list[int]:
    """The token ids of one row without its padding."""
    ids = torch.as_tensor(context[TOKENS])
    mask = torch.as_tensor(context[MASK]) if context.get(MASK) is not None else torch.ones_like(ids)
    if ids.dim() == 2 and len(ids) != 1:
        raise ValueError(f"context: expected a processor's output for one text, got {len(ids)} rows")
    return ids.flatten()[mask.flatten().bool()].tolist()  # type: ignore[no-any-return]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after another, padded with zeros in their other dimensions, as processors pad."""
    sizes = torch.tensor([tensor.shape for tensor in tensors]).amax(0).tolist()
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *sizes[1:])
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined
