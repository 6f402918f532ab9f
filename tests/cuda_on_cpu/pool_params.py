"""The params of window_pool's kernel for ctypes, and calls of the launcher on tensors."""

from __future__ import annotations

import ctypes

import emulation
import torch
from rope_params import DTYPES, POSITION_TYPES, RopeAngles, RopePositions, Strides
from torch import Tensor


class PoolTensor(ctypes.Structure):
    _fields_ = (
        ("in_", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("in_stride", Strides),
        ("out_stride", Strides),
    )


class PoolParams(ctypes.Structure):
    _fields_ = (
        ("tensors", PoolTensor * 2),
        ("dtype", ctypes.c_int),
        ("batch", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("windows", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("offsets_stride", ctypes.c_int64),
        ("angles", RopeAngles),
        ("scaling", ctypes.c_double),
        ("interleaved", ctypes.c_bool),
        ("inverse", ctypes.c_bool),
    )


STRUCTS = (("common/pool.h", "gistkit::PoolParams", PoolParams),)


def pool(
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    *,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
    tokens: int | None = None,
    checked: bool | None = None,
    **how: object,
) -> tuple[Tensor, Tensor]:
    """Means of windows; with `tokens` the transpose, from windows to so many tokens.

    offsets [B or 1, W + 1], positions [B or 1, W], inv_freq [R/2].
    """
    count = offsets.size(1) - 1
    rows = count if tokens is None else tokens
    out = [torch.full((*x.shape[:2], rows, x.size(3)), float("nan"), dtype=x.dtype) for x in (key, value)]
    params = PoolParams(dtype=DTYPES[key.dtype], scaling=scaling, interleaved=interleaved, inverse=tokens is not None)
    params.batch, params.windows = key.size(0), count
    params.tokens = key.size(2) if tokens is None else tokens
    params.offsets, params.offsets_stride = offsets.data_ptr(), 0 if offsets.size(0) == 1 else offsets.stride(0)
    params.angles.freq_heads = params.angles.axes = 1
    if positions is not None and inv_freq is not None:
        strides = Strides(0, 0 if positions.size(0) == 1 else positions.stride(0), positions.stride(1))
        where = RopePositions(positions.data_ptr(), POSITION_TYPES[positions.dtype], strides)
        double = inv_freq.dtype == torch.float64
        params.angles = RopeAngles(where, inv_freq.data_ptr(), double, 1, 1, inv_freq.size(0))
    for i, (x, y) in enumerate(zip((key, value), out, strict=True)):
        x_stride, y_stride = Strides(*x.stride()[:3]), Strides(*y.stride()[:3])
        params.tensors[i] = PoolTensor(x.data_ptr(), y.data_ptr(), x.size(1), x.size(3), x_stride, y_stride)
    given = {"key": key, "value": value, "offsets": offsets, "positions": positions, "inv_freq": inv_freq}
    written = {"key out": out[0], "value out": out[1]}
    library = emulation.build("pool", ["csrc/cuda/pool/pool.cu"], checked=checked, structs=STRUCTS)
    library.run("gistkit::cuda::window_pool", params, inputs=given, outputs=written, **how)
    return out[0], out[1]
