"""The tensor-core forward on a CPU: what is left beside the contract of all kernels."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_cases import Case, Forward
from attention_kernels import AMPERE, HOPPER, check_forward, forward, library
from emulation import ORDERS, SHARED_LIMIT, EmulatorError

pytestmark = pytest.mark.usefixtures("build")

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=[AMPERE, HOPPER], ids=["ampere", "hopper"])
def capability(request: pytest.FixtureRequest) -> int:
    return request.param


DIMS = [(1, 1), (17, 40), (64, 64), (80, 96), (96, 33), (128, 128), (192, 128), (160, 100), (256, 256), (64, 200)]


@pytest.mark.parametrize("dim,value_dim", DIMS)
def test_head_dims(dim: int, value_dim: int) -> None:
    for dtype in (BF16, FP16):
        check_forward(Case(141, 150, batch=1, heads=1, dim=dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("dim,value_dim", DIMS)
def test_shared_memory_is_what_is_said(dim: int, value_dim: int) -> None:
    """At most 99 KB, as sm_86, sm_89 and sm_120 have, but for the widest heads, which are refused there."""
    case, params = Case(70, 70, batch=1, heads=1, dim=dim, value_dim=value_dim, dtype=BF16), Forward()
    case.fill(params)
    needed = library("forward", AMPERE).function("gistkit::cuda::attention_forward_shared_bytes")(
        ctypes.c_void_p(ctypes.addressof(params))
    )
    check_forward(case, shared_limit=needed)
    if dim <= 192 and value_dim <= 128:
        assert needed <= 99 * 1024
    else:
        with pytest.raises(EmulatorError, match="attention_forward returned cudaError_t 1"):
            forward(case, shared_limit=99 * 1024)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 30.0])
def test_any_scale(scale: float, capability: int) -> None:
    class Scaled(Case):
        @property
        def scale(self) -> float:
            return scale

    check_forward(Scaled(140, 150, dim=32, dtype=BF16), capability=capability)


DECODING = {
    "one query": Case(1, 700, kind="full", heads=8, key_heads=2, dim=128, dtype=BF16),
    "spans": Case(3, 650, heads=4, key_heads=1, dim=64, dtype=FP16),
    "many rows": Case(70, 500, kind="causal", heads=3, key_heads=1, dim=64, bias="h", dtype=BF16),
    "odd": Case(2, 300, heads=2, key_heads=2, dim=36, value_dim=19, layout="odd", softcap=3.0, dtype=BF16),
    "tokens": Case(3, 300, heads=4, key_heads=2, dim=96, bias="h", layout="tokens", dtype=BF16),
}


@pytest.mark.parametrize("splits", [2, 5, 40])
@pytest.mark.parametrize("name", DECODING)
def test_split_keys(name: str, splits: int) -> None:
    """Also more parts than tiles."""
    check_forward(DECODING[name], splits=splits)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_parts_have_the_same_bits_in_any_order() -> None:
    first, *others = (forward(DECODING["tokens"], splits=3, order=order) for order in ORDERS)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("copies", ["eager", "lazy"])
def test_when_copies_arrive(copies: str, capability: int) -> None:
    for dim in (64, 128):
        case = Case(140, 300, batch=1, heads=1, dim=dim, dtype=BF16)
        check_forward(case, order="random", copies=copies, capability=capability)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_splits() -> None:
    """As many parts as fill the device, and no part without work for it."""
    choose = library("forward", AMPERE).function("gistkit::cuda::attention_forward_splits")
    for queries, keys, fewest, most in ((1, 32768, 8, 128), (1, 100, 1, 1), (8192, 8192, 1, 1), (1, 1000, 2, 4)):
        params = Forward(
            batch=1, query_heads=32, key_heads=8, num_queries=queries, num_keys=keys, dim_qk=128, dim_v=128
        )
        assert fewest <= choose(ctypes.byref(params), 132, SHARED_LIMIT) <= most
