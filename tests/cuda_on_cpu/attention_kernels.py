"""Attention's launchers on a case's tensors: float32's, those of tensor cores, and on a device with wgmma its own."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from attention_cases import (
    STRUCTS,
    Case,
    Device,
    TileLists,
    backward_of,
    check,
    forward_of,
    lists_of,
)
from emulation import SHARED_LIMIT, Library, build, configure, statistics
from torch import Tensor

from gistkit.ops import reference
from tests.helpers.rounding import plain_attention, rounded_weights

# Ten times the compute capability, of which the second has wgmma; float32's kernels are the same on any.
FP32, AMPERE, HOPPER = 0, 80, 90
MMA, WGMMA = 0, 1
TILE_QUERIES, TILE_KEYS = 128, 64
RESULTS, GRADIENTS = ("out", "lse"), ("grad_query", "grad_key", "grad_value", "grad_key_bias")


def library(direction: str, capability: int, defines: tuple[str, ...] = ()) -> Library:
    """One for each device: what is asked about a device is asked once."""
    if capability == FP32:
        names, name = ["fp32", "pairwise"], "attention_fp32"
    else:
        halves = [f"{kind}{direction}{dtype}" for kind in ("", "hopper_") for dtype in ("", "_bf16", "_fp16")]
        names = [*halves, "pairwise", *(["tile_lists"] if direction == "backward" else [])]
        name = f"attention_{direction}_{capability}"
    return build(name, [f"csrc/cuda/attention/{n}.cu" for n in names], defines=defines, structs=STRUCTS)


def launch(
    direction: str,
    params: ctypes.Structure,
    device: Device,
    inputs: dict[str, Tensor | None],
    outputs: dict[str, Tensor],
    *,
    capability: int,
    defines: tuple[str, ...] = (),
    **options: str,
) -> None:
    kernels, limit = library(direction, capability, defines), device.shared_limit
    where = {"shared_limit": limit, "capability": capability or AMPERE}
    configure(**where)
    name = f"gistkit::cuda::attention_{'fp32_' if capability == FP32 else ''}{direction}"
    if (capability, direction) != (FP32, "forward"):
        arguments = [params] if capability == FP32 else [params, device]
        size = kernels.function(f"{name.removesuffix('_backward') if capability == FP32 else name}_workspace")
        size.restype = ctypes.c_size_t
        workspace = torch.full((size(*map(ctypes.byref, arguments)) // 4,), torch.nan)
        device.workspace, outputs = workspace.data_ptr(), {**outputs, "workspace": workspace}
    kernels.run(name, params, device, inputs=inputs, outputs=outputs, **where, **options)


def forward(
    case: Case,
    capability: int = AMPERE,
    *,
    splits: int = 1,
    lists: TileLists | None = None,
    shared_limit: int = SHARED_LIMIT,
    **options: object,
) -> list[Tensor]:
    """[out, lse]"""
    (params, results), lists = forward_of(case), lists or lists_of(case)[0]
    device = Device(key_tiles=lists.params, splits=splits, shared_limit=shared_limit)
    inputs = {**case.inputs("query", "key", "value", "key_bias"), **lists.tensors("key_tiles")}
    launch("forward", params, device, inputs, results, capability=capability, **options)
    return list(results.values())


def backward(
    case: Case,
    capability: int = AMPERE,
    *,
    lists: tuple[TileLists, TileLists] | None = None,
    shared_limit: int = SHARED_LIMIT,
    results: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = True,
    **options: object,
) -> list[Tensor]:
    """[grad_query, grad_key, grad_value] and with a bias its gradient, from `results` or the reference's."""
    query, key, value = (case.tensors[name].nan_to_num() for name in ("query", "key", "value"))
    how = {"scale": case.scale, "softcap": case.softcap, "key_bias": case.tensors.get("key_bias")}
    out, lse = results or reference.attention(query, key, value, case.plan, return_lse=True, **how)
    out = case.empty(case.heads, case.queries, case.value_dim).copy_(out)
    params, grads = backward_of(case, out, lse)
    params.deterministic = deterministic
    key_tiles, query_tiles = lists or lists_of(case)
    inputs = {
        **case.inputs("query", "key", "value", "key_bias", "grad_out", "grad_lse"),
        **key_tiles.tensors("key_tiles"),
        **query_tiles.tensors("query_tiles"),
        "out": out,
        "lse": lse,
    }
    device = Device(key_tiles.params, query_tiles.params, 1, shared_limit)
    by_wgmma = capability == HOPPER and path("backward", case, shared_limit=shared_limit) == WGMMA
    if by_wgmma:
        statistics()
    launch("backward", params, device, inputs, grads, capability=capability, **options)
    if by_wgmma:
        # The launcher's word for it is not enough: mma's operands come by loads of matrices.
        found = statistics()
        assert found.products and not found.matrix_loads
    return list(grads.values())


def check_forward(case: Case, capability: int = AMPERE, **options: object) -> list[Tensor]:
    """Against the torch form that rounds nothing but its result, or what Hopper's kernel has to round too."""
    got = forward(case, capability, **options)
    form = {FP32: plain_attention, AMPERE: reference.attention, HOPPER: rounded_weights}[capability]
    check(case, got, RESULTS, form=form)
    return got


def check_backward(case: Case, capability: int = AMPERE, **options: object) -> None:
    grads = backward(case, capability, **options)
    check(case, grads, GRADIENTS[: len(grads)])


def path(
    direction: str,
    case: Case,
    *,
    capability: int = HOPPER,
    shared_limit: int = SHARED_LIMIT,
    splits: int = 1,
    scale: float | None = None,
) -> int:
    """Who takes a case, by the launcher's own word: MMA or WGMMA."""
    params, results = forward_of(case)
    if direction == "backward":
        # Held until the launcher has looked at their addresses.
        params, _gradients = backward_of(case, *results.values())
    if scale is not None:
        params.scale = scale
    device = Device(splits=splits, shared_limit=shared_limit)
    configure(shared_limit=shared_limit, capability=capability)
    choose = library(direction, capability).function(f"gistkit::cuda::attention_{direction}_path")
    return choose(ctypes.byref(params), ctypes.byref(device))


def other(case: Case, **changes: object) -> Case:
    """The case with other sizes; heads of values are as wide as keys unless said."""
    return replace(case, tensors={}, **{"value_dim": None, **changes})
