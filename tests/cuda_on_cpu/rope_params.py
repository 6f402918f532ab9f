"""The params of RoPE's kernels for ctypes, and calls of the launchers on tensors."""

from __future__ import annotations

import ctypes

import emulation
import torch
from emulation import DTYPES, Bool, Double, Int, Long, Pointer, mirror
from torch import Tensor

POSITION_TYPES = {torch.int32: 0, torch.int64: 1, torch.float32: 2, torch.float64: 3}
Strides = Long * 3

RopePositions = mirror("RopePositions", ("data", Pointer), ("type", Int), ("stride", Strides))
RopeAngles = mirror(
    "RopeAngles",
    ("positions", RopePositions),
    ("inv_freq", Pointer),
    ("inv_freq_double", Bool),
    ("freq_heads axes freqs", Long),
)
RopeTensor = mirror("RopeTensor", ("in_ out", Pointer), ("heads", Long), ("in_stride out_stride", Strides))
RopeParams = mirror(
    "RopeParams",
    ("tensors", RopeTensor * 2),
    ("dtype", Int),
    ("batch tokens dim", Long),
    ("angles", RopeAngles),
    ("scaling", Double),
    ("interleaved inverse", Bool),
)
RopeGradTensor = mirror(
    "RopeGradTensor", ("grad heads", Pointer), ("count", Long), ("grad_stride heads_stride", Strides)
)
RopeAngleGradParams = mirror(
    "RopeAngleGradParams",
    ("tensors", RopeGradTensor * 2),
    ("dtype", Int),
    ("batch tokens", Long),
    ("angles", RopeAngles),
    ("scaling", Double),
    ("interleaved inverse positions_shared", Bool),
    ("grad_positions grad_inv_freq", Pointer),
)
RopeAngleGrad = mirror("RopeAngleGrad", ("problem", RopeAngleGradParams), ("workspace", Pointer))


STRUCTS = (
    ("common/rope.h", "gistkit::RopePositions", RopePositions),
    ("common/rope.h", "gistkit::RopeAngles", RopeAngles),
    ("common/rope.h", "gistkit::RopeParams", RopeParams),
    ("common/rope.h", "gistkit::RopeAngleGradParams", RopeAngleGradParams),
    ("cuda/rope/rope.h", "gistkit::cuda::RopeAngleGrad", RopeAngleGrad),
)


def library(*, checked: bool | None = None) -> emulation.Library:
    sources = ["csrc/cuda/rope/rotation.cu", "csrc/cuda/rope/gradient.cu"]
    return emulation.build("rope", sources, checked=checked, structs=STRUCTS)


def angles_of(positions: Tensor, inv_freq: Tensor) -> RopeAngles:
    """positions [A, B or 1, N], inv_freq [H or 1, A, R/2]."""
    strides = list(positions.stride())
    if positions.size(1) == 1:
        strides[1] = 0
    where = RopePositions(positions.data_ptr(), POSITION_TYPES[positions.dtype], Strides(*strides))
    return RopeAngles(where, inv_freq.data_ptr(), inv_freq.dtype == torch.float64, *inv_freq.shape)


def rope(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
    outputs: tuple[Tensor, Tensor] | None = None,
    checked: bool | None = None,
    **how: object,
) -> tuple[Tensor, Tensor]:
    """Rotated query and key; in place where `outputs` are the same tensors."""
    out = outputs or (torch.full_like(query, float("nan")), torch.full_like(key, float("nan")))
    params = RopeParams(dtype=DTYPES[query.dtype], scaling=scaling, interleaved=interleaved, inverse=inverse)
    params.batch, params.tokens, params.dim = query.size(0), query.size(2), query.size(3)
    params.angles = angles_of(positions, inv_freq)
    for i, (x, y) in enumerate(zip((query, key), out, strict=True)):
        x_stride, y_stride = Strides(*x.stride()[:3]), Strides(*y.stride()[:3])
        params.tensors[i] = RopeTensor(x.data_ptr(), y.data_ptr(), x.size(1), x_stride, y_stride)
    given = {"positions": positions, "inv_freq": inv_freq}
    if outputs is None:
        given |= {"query": query, "key": key}
    written = {"rotated query": out[0], "rotated key": out[1]}
    library(checked=checked).run("gistkit::cuda::rope", params, inputs=given, outputs=written, **how)
    return out


def rope_angle_grad(
    grads: tuple[Tensor, Tensor],
    heads: tuple[Tensor, Tensor],
    positions: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
    checked: bool | None = None,
    **how: object,
) -> tuple[Tensor, Tensor]:
    """float64 gradients by positions and inv_freq, of their shapes."""
    batch, _, tokens, _ = heads[0].shape
    problem = RopeAngleGradParams(dtype=DTYPES[heads[0].dtype], batch=batch, tokens=tokens, scaling=scaling)
    problem.interleaved, problem.inverse, problem.positions_shared = interleaved, inverse, positions.size(1) == 1
    problem.angles = angles_of(positions, inv_freq)
    for i, (g, x) in enumerate(zip(grads, heads, strict=True)):
        strides = Strides(*g.stride()[:3]), Strides(*x.stride()[:3])
        problem.tensors[i] = RopeGradTensor(g.data_ptr(), x.data_ptr(), x.size(1), *strides)
    by_positions = torch.full(positions.shape, float("nan"), dtype=torch.float64)
    by_inv_freq = torch.full(inv_freq.shape, float("nan"), dtype=torch.float64)
    problem.grad_positions, problem.grad_inv_freq = by_positions.data_ptr(), by_inv_freq.data_ptr()
    lib = library(checked=checked)
    workspace_of = lib.function("gistkit::cuda::rope_angle_grad_workspace")
    workspace_of.argtypes, workspace_of.restype = [ctypes.c_void_p], ctypes.c_int64
    workspace = torch.full((workspace_of(ctypes.addressof(problem)) // 8,), float("nan"), dtype=torch.float64)
    given = {"positions": positions, "inv_freq": inv_freq}
    given |= {"grad query": grads[0], "grad key": grads[1], "query": heads[0], "key": heads[1]}
    written = {"grad positions": by_positions, "grad inv_freq": by_inv_freq, "workspace": workspace}
    params = RopeAngleGrad(problem, workspace.data_ptr())
    lib.run("gistkit::cuda::rope_angle_grad", params, inputs=given, outputs=written, **how)
    return by_positions, by_inv_freq
