"""The tensor-core forward on a CPU against the reference in fp64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_cases import STRUCTS, Case, Device, Forward, Rows, TileLists, check, lists_of
from emulation import ORDERS, SHARED_LIMIT, EmulatorError, Library, build, configure
from test_tile_lists import build_tiles
from torch import Tensor

from gistkit.ops import reference
from tests.helpers.rounding import rounded_weights

pytestmark = pytest.mark.usefixtures("build")

NAMES = ("forward", "forward_bf16", "forward_fp16", "pairwise")
NAMES += ("hopper_forward", "hopper_forward_bf16", "hopper_forward_fp16")
SOURCES = [f"csrc/cuda/attention/{name}.cu" for name in NAMES]
TILE_QUERIES, TILE_KEYS = 128, 64
# Ten times the compute capability: on the second device kernels for Hopper take what they can.
AMPERE, HOPPER = 80, 90
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=[AMPERE, HOPPER], ids=["ampere", "hopper"])
def capability(request: pytest.FixtureRequest) -> int:
    return request.param


def library(capability: int = AMPERE, defines: tuple[str, ...] = ()) -> Library:
    """One for each device: what is asked about a device is asked once."""
    return build(f"attention_forward_{capability}", SOURCES, defines=defines, structs=STRUCTS)


def forward(
    case: Case,
    *,
    splits: int = 1,
    lists: TileLists | None = None,
    shared_limit: int = SHARED_LIMIT,
    capability: int = AMPERE,
    defines: tuple[str, ...] = (),
    **options: str,
) -> list[Tensor]:
    """[out, lse]"""
    params = Forward()
    lists = lists or lists_of(case)[0]
    case.fill(params)
    out = case.empty(case.heads, case.queries, case.value_dim)
    lse = torch.full((case.batch, case.heads, case.queries), torch.nan)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    kernels = library(capability, defines)
    configure(shared_limit=shared_limit, capability=capability)
    device = Device(key_tiles=lists.params, splits=splits, shared_limit=shared_limit)
    size = kernels.function("gistkit::cuda::attention_forward_workspace")
    size.restype = ctypes.c_size_t
    workspace = torch.full((size(ctypes.byref(params), ctypes.byref(device)) // 4,), torch.nan)
    device.workspace = workspace.data_ptr()
    kernels.run(
        "gistkit::cuda::attention_forward",
        params,
        device,
        inputs={**case.inputs("query", "key", "value", "key_bias"), **lists.tensors("key_tiles")},
        outputs={"out": out, "lse": lse, "workspace": workspace},
        shared_limit=shared_limit,
        capability=capability,
        **options,
    )
    return [out, lse]


def check_forward(case: Case, capability: int = AMPERE, **options: object) -> list[Tensor]:
    """Against the torch form that rounds nothing but its result, or what Hopper's kernel has to round too."""
    got = forward(case, capability=capability, **options)
    check(case, got, ("out", "lse"), form=reference.attention if capability == AMPERE else rounded_weights)
    return got


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize("length", [1, 63, 65, 200, 203])
def test_parity(length: int, kind: str, capability: int) -> None:
    for dtype in (BF16, FP16):
        for dim in (64, 128):
            case = Case(length, kind=kind, batch=1, heads=length % 2 + 1, dim=dim, dtype=dtype)
            check_forward(case, capability=capability)


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
    needed = library().function("gistkit::cuda::attention_forward_shared_bytes")(
        ctypes.c_void_p(ctypes.addressof(params))
    )
    check_forward(case, shared_limit=needed)
    if dim <= 192 and value_dim <= 128:
        assert needed <= 99 * 1024
    else:
        with pytest.raises(EmulatorError, match="attention_forward returned cudaError_t 1"):
            forward(case, shared_limit=99 * 1024)


CASES = {
    "gqa": Case(203, 150, heads=4, key_heads=2, dim=40, dtype=BF16),
    "packed heads": Case(50, 150, heads=6, key_heads=2, dim=64, dtype=FP16),
    "cap": Case(130, 70, dim=64, softcap=2.0, dtype=BF16),
    "bias": Case(130, 70, dim=64, bias="bh", dtype=FP16),
    "bias of packed heads": Case(40, 70, heads=6, key_heads=2, dim=64, bias="h", dtype=BF16),
    "shared bias of packed heads": Case(40, 70, heads=6, key_heads=2, dim=64, bias="b", dtype=BF16),
    "bias and cap": Case(130, 70, dim=128, bias="h", softcap=2.0, dtype=BF16),
    "infinite bias": Case(67, 66, dim=64, bias="i", kind="causal", dtype=BF16),
    "tokens first": Case(140, 70, dim=64, heads=4, key_heads=2, layout="tokens", dtype=BF16),
    "unaligned": Case(140, 70, dim=64, layout="odd", dtype=FP16),
    "unaligned, narrow": Case(140, 70, dim=20, value_dim=7, layout="odd", dtype=BF16),
    "unaligned, wide": Case(70, 70, dim=180, value_dim=130, layout="odd", dtype=BF16),
    "recent and far": Case(203, 200, batch=1, heads=1, kind="dodo", dim=64, dtype=BF16),
    "few stages": Case(140, 200, batch=1, heads=1, kind="causal", dim=128, dtype=FP16),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str, capability: int) -> None:
    check_forward(CASES[name], capability=capability)


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
@pytest.mark.parametrize(
    "case,splits", [(CASES["recent and far"], 1), (CASES["few stages"], 1), (DECODING["tokens"], 3)]
)
def test_same_bits_in_any_order(case: Case, splits: int, capability: int) -> None:
    first = forward(case, splits=splits, capability=capability)
    for order in ORDERS[1:]:
        other = forward(case, splits=splits, capability=capability, order=order)
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("copies", ["eager", "lazy"])
def test_when_copies_arrive(copies: str, capability: int) -> None:
    for dim in (64, 128):
        case = Case(140, 300, batch=1, heads=1, dim=dim, dtype=BF16)
        check_forward(case, order="random", copies=copies, capability=capability)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_keys(splits: int, capability: int) -> None:
    """Out 0 and lse -inf, also where the only key has a bias of -inf and where a list has no tile."""
    case = Case(140, 40, dim=8, bias="b", dtype=BF16)
    case.plan.spans[:] = 0
    case.plan.spans[:, 1, 0] = torch.tensor([1, 2])
    case.tensors["key_bias"][..., 1] = -torch.inf
    out, lse = forward(case, splits=splits, capability=capability)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int, capability: int) -> None:
    out, lse = forward(Case(queries, keys, dim=8, dtype=BF16), capability=capability)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("queries", [1, 140])
def test_keys_that_no_row_sees_are_never_read(queries: int, capability: int) -> None:
    """A cache's unused ends may hold anything."""
    cases = [Case(queries, 300, dim=64, dtype=BF16) for _ in range(2)]
    for case in cases:
        case.plan.spans.clamp_(30, 200)
    for name in ("key", "value"):
        cases[0].tensors[name][:, :, :30] = cases[0].tensors[name][:, :, 200:] = torch.nan
    got, expected = (forward(case, capability=capability) for case in cases)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_bad_numbers_stay_visible(capability: int) -> None:
    case = Case(100, 100, kind="causal", heads=1, dim=16, dtype=BF16)
    case.tensors["query"][0, 0, 70, 5] = torch.nan
    out, lse = forward(case, capability=capability)
    bad = lse.isnan()
    assert bad[0, 0, 70] and bad.sum() == 1
    assert out[0, 0, 70].isnan().all() and out.isnan().sum() == 16


@pytest.mark.parametrize("kind", ["gistpool", "random"])
def test_lists_made_on_the_device(kind: str, capability: int) -> None:
    case = Case(300, 290, kind=kind, dim=64, dtype=BF16)
    _, made, _ = build_tiles(case.plan.spans, case.keys, TILE_QUERIES, TILE_KEYS)
    expected = forward(case, capability=capability)
    for mine, other in zip(forward(case, lists=made.flat(), capability=capability), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("build", ["forward"], indirect=True)
@pytest.mark.parametrize("queries,keys,batch", [(300, 290, 2), (100, 290, 1), (300, 60, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_lists_of_any_values_read_nothing_else(seed: int, queries: int, keys: int, batch: int, capability: int) -> None:
    case = Case(queries, keys, batch=batch, dim=16, bias="bh", dtype=BF16)
    forward(
        case, lists=lists_of(case)[0].spoiled(seed), splits=1 + seed * (capability == AMPERE), capability=capability
    )


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_splits() -> None:
    """As many parts as fill the device, and no part without work for it."""
    kernels = library()
    choose = kernels.function("gistkit::cuda::attention_forward_splits")
    for queries, keys, fewest, most in ((1, 32768, 8, 128), (1, 100, 1, 1), (8192, 8192, 1, 1), (1, 1000, 2, 4)):
        params = Forward(
            batch=1, query_heads=32, key_heads=8, num_queries=queries, num_keys=keys, dim_qk=128, dim_v=128
        )
        assert fewest <= choose(ctypes.byref(params), 132, SHARED_LIMIT) <= most
