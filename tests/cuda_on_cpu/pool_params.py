"""The params of window_pool's kernel for ctypes, and calls of the launcher on tensors."""

from __future__ import annotations

import emulation
import torch
from emulation import DTYPES, Bool, Double, Int, Long, Pointer, mirror
from rope_params import POSITION_TYPES, RopeAngles, RopePositions, Strides
from torch import Tensor

PoolTensor = mirror("PoolTensor", ("in_ out", Pointer), ("heads dim", Long), ("in_stride out_stride", Strides))
PoolParams = mirror(
    "PoolParams",
    ("tensors", PoolTensor * 2),
    ("dtype", Int),
    ("batch tokens windows", Long),
    ("offsets", Pointer),
    ("offsets_stride", Long),
    ("angles", RopeAngles),
    ("scaling", Double),
    ("interleaved inverse", Bool),
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
