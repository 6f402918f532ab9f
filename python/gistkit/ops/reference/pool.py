"""Means over windows of tokens in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gistkit.ops.reference.rope import rope


def window_pool(
    key: Tensor,
    value: Tensor | None = None,
    *,
    windows: int | Tensor,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same contract as `gistkit.ops.window_pool`; sums by scatter_add, the rotation by `reference.rope`."""
    tokens = key.shape[-2]
    if isinstance(windows, Tensor):
        offsets = (windows if windows.dim() == 2 else windows[None]).contiguous()
    else:
        offsets = torch.arange(0, tokens + windows, windows, device=key.device).clamp(max=tokens)[None]
    keys = _means(key, offsets)
    if positions is not None and inv_freq is not None:
        none = keys.new_empty((keys.shape[0], 0, *keys.shape[2:]))
        keys, _ = rope(keys, none, positions, inv_freq, scaling=scaling, interleaved=interleaved)
    if value is None:
        return keys.to(key.dtype)
    return keys.to(key.dtype), _means(value, offsets).to(value.dtype)


def _means(x: Tensor, offsets: Tensor) -> Tensor:
    """In the precision of the sums."""
    heads = (x if x.dim() == 4 else x[:, None]).to(torch.promote_types(x.dtype, torch.float32))
    batch, _, tokens, _ = heads.shape
    count = offsets.shape[1] - 1
    # Rows 0 and W + 1 take the tokens in front of the first window and behind the last.
    row = torch.searchsorted(offsets, torch.arange(tokens, device=x.device).repeat(len(offsets), 1), right=True)
    sums = heads.new_zeros((*heads.shape[:2], count + 2, heads.shape[3]))
    sums = sums.scatter_add(2, row[:, None, :, None].expand(batch, *heads.shape[1:]), heads)
    means = sums[:, :, 1:-1] / offsets.diff().clamp(min=1)[:, None, :, None]
    return means if x.dim() == 4 else means[:, 0]
