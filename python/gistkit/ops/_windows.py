"""Checks of window_pool's arguments, and windows as offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from gistkit import _gpu
from gistkit.ops.rope import DTYPES, kernel_angles


def check_pool(
    key: Tensor, value: Tensor | None, windows: int | Tensor, positions: Tensor | None, inv_freq: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Checks the arguments; offsets [B or 1, W + 1], positions [B or 1, W] and inv_freq, in types kernels read."""
    tensors = {"key": key, "value": value, "positions": positions, "inv_freq": inv_freq}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "key"):
            raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if key.dim() not in (3, 4):
        raise ValueError(f"key: expected [B, H, N, D] or [B, N, D], got shape {tuple(key.shape)}")
    if key.dtype not in DTYPES:
        raise TypeError(f"key: expected float32, float64, bfloat16 or float16, got {key.dtype}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != key.device:
            raise ValueError(f"{name}: expected key's device {key.device}, got {tensor.device}")
    batch, tokens = key.shape[0], key.shape[-2]
    if value is not None:
        if value.dtype != key.dtype:
            raise TypeError(f"value: expected key's dtype {key.dtype}, got {value.dtype}")
        if value.dim() != key.dim() or value.shape[0] != batch or value.shape[-2] != tokens:
            form = "[{}, {}, D]" if key.dim() == 3 else "[{}, H, {}, D]"
            raise ValueError(f"value: expected {form.format(batch, tokens)} as key's, got shape {tuple(value.shape)}")
    offsets = _checked_offsets(windows, key) if isinstance(windows, Tensor) else _equal_windows(windows, key)
    if (positions is None) != (inv_freq is None):
        absent = "positions" if positions is None else "inv_freq"
        raise ValueError(f"{absent}: expected positions and inv_freq together, got {absent} None")
    if positions is None or inv_freq is None:
        return offsets, None, None
    return offsets, *_checked_angles(key, offsets.shape[1] - 1, positions, inv_freq)


def _equal_windows(ratio: int, key: Tensor) -> Tensor:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, torch.SymInt)):
        raise TypeError(f"windows: expected an int or a tensor of offsets, got {type(ratio).__name__}")
    if ratio < 1:
        raise ValueError(f"windows: expected at least 1 token in a window, got {ratio}")
    tokens = key.shape[-2]
    if tokens < 1:
        raise ValueError(f"key: expected at least 1 token, got shape {tuple(key.shape)}")
    count = (tokens + ratio - 1) // ratio
    return torch.arange(0, count * ratio + 1, ratio, device=key.device).clamp_(max=tokens)[None]


def _checked_offsets(offsets: Tensor, key: Tensor) -> Tensor:
    batch, tokens = key.shape[0], key.shape[-2]
    if offsets.dtype != torch.int64:
        raise TypeError(f"windows: expected offsets of dtype torch.int64, got {offsets.dtype}")
    if offsets.device != key.device:
        raise ValueError(f"windows: expected key's device {key.device}, got {offsets.device}")
    shape = tuple(offsets.shape)
    if offsets.dim() not in (1, 2) or offsets.shape[-1] < 2 or (offsets.dim() == 2 and offsets.shape[0] != batch):
        raise ValueError(f"windows: expected offsets [W + 1] or [{batch}, W + 1] of W >= 1 windows, got shape {shape}")
    rows = offsets if offsets.dim() == 2 else offsets[None]
    if _gpu.has_values(rows):
        _check_values(rows, tokens, padded=offsets.dim() == 2)
    return rows.contiguous()


def _check_values(rows: Tensor, tokens: int, *, padded: bool) -> None:
    begin, end = rows[:, :-1], rows[:, 1:]

    def first(wrong: Tensor) -> list[int] | None:
        return wrong.nonzero()[0].tolist() if wrong.any() else None

    if at := first((rows < 0) | (rows > tokens)):
        raise ValueError(f"windows: expected offsets from 0 to N = {tokens}, got {rows[*at]} in row {at[0]}")
    if at := first(end < begin):
        raise ValueError(f"windows: expected ascending offsets, got {begin[*at]}, then {end[*at]} in row {at[0]}")
    # What follows a row's last offset are missing windows; where all rows share theirs, none is missing.
    if at := first((begin == end) & (begin < rows[:, -1:]) if padded else begin == end):
        raise ValueError(
            f"windows: expected a token in every window, got window {at[1]} of row {at[0]} from {begin[*at]} to "
            f"{end[*at]}"
        )


def _checked_angles(key: Tensor, windows: int, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    if key.dim() != 4:
        raise ValueError(f"positions: expected None for hidden states [B, N, D], got shape {tuple(positions.shape)}")
    batch, dim = key.shape[0], key.shape[3]
    if not inv_freq.is_floating_point():
        raise TypeError(f"inv_freq: expected a floating dtype, got {inv_freq.dtype}")
    if inv_freq.dim() != 1 or 2 * inv_freq.shape[0] > dim:
        raise ValueError(
            f"inv_freq: expected [R/2] of at most D/2 = {dim // 2} frequencies, got shape {tuple(inv_freq.shape)}"
        )
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions: expected an integer or floating dtype, got {positions.dtype}")
    if (
        positions.dim() not in (1, 2)
        or positions.shape[-1] != windows
        or (positions.dim() == 2 and positions.shape[0] not in (1, batch))
    ):
        raise ValueError(
            f"positions: expected [W] or [B, W] with B = {batch}, W = {windows}, got shape {tuple(positions.shape)}"
        )
    for name, tensor in (("positions", positions), ("inv_freq", inv_freq)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: expected no gradient to be recorded, got one that requires grad")
    positions, inv_freq = kernel_angles(positions, inv_freq)
    return positions if positions.dim() == 2 else positions[None], inv_freq
