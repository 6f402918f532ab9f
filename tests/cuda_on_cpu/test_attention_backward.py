"""The tensor-core backward kernels of attention on a CPU against gradients of the reference in fp64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_cases import STRUCTS, Backward, Case, Device, TileLists, backward_of, check, lists_of
from emulation import ORDERS, SHARED_LIMIT, EmulatorError, Library, build, configure, statistics
from test_tile_lists import build_tiles
from torch import Tensor

from gistkit.ops import reference

pytestmark = pytest.mark.usefixtures("build")

NAMES = ("backward", "backward_bf16", "backward_fp16", "pairwise", "tile_lists")
NAMES += ("hopper_backward", "hopper_backward_bf16", "hopper_backward_fp16")
SOURCES = [f"csrc/cuda/attention/{name}.cu" for name in NAMES]
TILE_QUERIES, TILE_KEYS = 128, 64
GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_key_bias")


def library(capability: int = 80, defines: tuple[str, ...] = ()) -> Library:
    """One for each device: what is asked about a device is asked once."""
    return build(f"attention_backward_{capability}", SOURCES, defines=defines, structs=STRUCTS)


def backward(
    case: Case,
    *,
    lists: tuple[TileLists, TileLists] | None = None,
    shared_limit: int = SHARED_LIMIT,
    results: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = True,
    capability: int = 80,
    defines: tuple[str, ...] = (),
    **options: str,
) -> list[Tensor]:
    """[grad_query, grad_key, grad_value] and with a bias its gradient, from `results` or the reference's."""
    bias = case.tensors.get("key_bias")
    query, key, value = (case.tensors[name] for name in ("query", "key", "value"))
    out, lse = results or reference.attention(
        *(t.nan_to_num() for t in (query, key, value)),
        case.plan,
        scale=case.scale,
        softcap=case.softcap,
        key_bias=bias,
        return_lse=True,
    )
    out = case.empty(case.heads, case.queries, case.value_dim).copy_(out)
    params, grads = backward_of(case, out, lse)
    key_tiles, query_tiles = lists or lists_of(case)
    device = Device(key_tiles.params, query_tiles.params, 1, shared_limit)
    params.deterministic = deterministic
    kernels = library(capability, defines)
    configure(shared_limit=shared_limit, capability=capability)
    size = kernels.function("gistkit::cuda::attention_backward_workspace")
    size.restype = ctypes.c_size_t
    workspace = torch.full((size(ctypes.byref(params), ctypes.byref(device)) // 4,), torch.nan)
    device.workspace = workspace.data_ptr()
    kernels.run(
        "gistkit::cuda::attention_backward",
        params,
        device,
        inputs={
            **case.inputs("query", "key", "value", "key_bias", "grad_out", "grad_lse"),
            **key_tiles.tensors("key_tiles"),
            **query_tiles.tensors("query_tiles"),
            "out": out,
            "lse": lse,
        },
        outputs={**grads, "workspace": workspace},
        shared_limit=shared_limit,
        capability=capability,
        **options,
    )
    return list(grads.values())


def check_case(case: Case, **options: object) -> None:
    grads = backward(case, **options)
    check(case, grads, GRADIENTS[: len(grads)])


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize("length", [1, 63, 65, 200, 203])
def test_parity(length: int, kind: str) -> None:
    check_case(Case(length, kind=kind, batch=1, dim=64, dtype=torch.bfloat16))


BF16 = {"dtype": torch.bfloat16}
CASES = {
    "float16": Case(130, 150, dim=64, dtype=torch.float16),
    "gqa": Case(140, 111, heads=4, key_heads=2, dim=64, **BF16),
    "no lists shared": Case(200, 140, batch=3, heads=1, dim=40, **BF16),
    "96": Case(150, 130, heads=1, dim=96, batch=1, **BF16),
    "128": Case(203, 150, heads=2, dim=128, batch=1, **BF16),
    "128 causal": Case(200, heads=2, dim=128, batch=1, kind="causal", **BF16),
    "192-128": Case(150, 130, heads=1, dim=192, value_dim=128, batch=1, **BF16),
    "192-128 group": Case(130, 70, heads=2, dim=180, value_dim=100, batch=1, bias="h", softcap=4.0, **BF16),
    "256": Case(150, 130, heads=1, dim=256, batch=1, **BF16),
    "narrow": Case(70, 90, dim=5, value_dim=3, **BF16),
    "40-24": Case(70, 90, dim=40, value_dim=24, **BF16),
    "cap": Case(130, 140, dim=64, softcap=3.0, **BF16),
    "bias": Case(130, 140, dim=64, bias="bh", **BF16),
    "bias of groups": Case(130, 140, dim=32, heads=4, key_heads=2, bias="h", **BF16),
    "cap and bias": Case(130, 140, dim=64, bias="b", softcap=2.0, dtype=torch.float16),
    "infinite bias": Case(130, 131, dim=64, bias="i", kind="causal", **BF16),
    "tokens": Case(70, 90, dim=64, layout="tokens", **BF16),
    "odd": Case(70, 90, dim=64, layout="odd", **BF16),
    "odd, wide": Case(33, 65, heads=1, batch=1, dim=150, value_dim=96, layout="odd", dtype=torch.float16),
    "one": Case(1, 1, dim=8, **BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["float16", "96", "128", "128 causal", "192-128", "192-128 group"])
def test_99_kb_of_shared_memory(name: str) -> None:
    """As much as sm_86, sm_89 and sm_120 have."""
    check_case(CASES[name], shared_limit=99 * 1024)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_too_little_shared_memory() -> None:
    with pytest.raises(EmulatorError, match="attention_backward returned cudaError_t 1"):
        backward(CASES["256"], shared_limit=99 * 1024)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("limit", [SHARED_LIMIT, 163 * 1024])
@pytest.mark.parametrize("name", ["128", "192-128 group", "256"])
def test_shared_memory_is_what_is_said(name: str, limit: int) -> None:
    case, params = CASES[name], Backward()
    case.fill(params)
    needed = library().function("gistkit::cuda::attention_backward_shared_bytes")(
        ctypes.c_void_p(ctypes.addressof(params)), limit
    )
    assert needed <= limit
    check_case(case, shared_limit=needed)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_same_bits_in_any_order(dim: int) -> None:
    case = Case(203, 150, batch=1, dim=dim, **BF16)
    first = backward(case)
    for order in ORDERS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, backward(case, order=order), strict=True))


# Capability of the device, queries, and a dim; wgmma's kernels take the last two.
DEVICES = [(80, 50, 16), (90, 130, 64), (90, 130, 128)]


@pytest.mark.parametrize("capability,rows,dim", DEVICES)
def test_rows_without_keys(capability: int, rows: int, dim: int) -> None:
    """No gradient, whatever comes from above; other rows of the tile keep theirs."""
    case = Case(rows, rows + 10, dim=dim, bias="b", **BF16)
    case.plan.spans[:] = 0
    case.plan.spans[:, 1, 0] = torch.tensor([1, 2])
    case.tensors["key_bias"][..., 1] = -torch.inf
    case.tensors["grad_out"][:] = torch.nan
    assert all((t == 0).all() for t in backward(case, capability=capability))
    case = Case(rows + 20, rows + 30, dim=dim, **BF16)
    expected = backward(case, capability=capability)
    case.tensors["grad_out"][~reference.dense_mask(case.plan).any(-1)[:, None].expand(-1, 2, -1)] = torch.nan
    assert case.tensors["grad_out"].isnan().any()
    assert all(torch.equal(a, b) for a, b in zip(backward(case, capability=capability), expected, strict=True))


@pytest.mark.parametrize("capability,rows,dim", DEVICES)
def test_unseen_keys_may_hold_anything(capability: int, rows: int, dim: int) -> None:
    case, end = Case(rows, rows + 40, dim=dim, **BF16), rows + 20
    case.plan.spans.clamp_(max=end)
    for name in ("key", "value"):
        case.tensors[name][:, :, end:] = 0
    expected = backward(case, capability=capability)
    for name in ("key", "value"):
        case.tensors[name][:, :, end:] = torch.nan
    assert all(torch.equal(a, b) for a, b in zip(backward(case, capability=capability), expected, strict=True))


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int) -> None:
    assert all((t == 0).all() for t in backward(Case(queries, keys, dim=8, bias="h", **BF16)))


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("dim", [96, 128])
def test_operands_of_query_gradients_serve_two_products(dim: int) -> None:
    """Counts matrices of 8x8 read from shared memory, four a load, for 64 more keys that 128 queries see in full.

    In a pass over 16 dims each of the 8 warps of queries loads keys twice, values once (two loads for 32 keys) and two
    bands of queries and gradients; each of the 4 warps of keys, for 64 queries, two bands of its own and 4 + 4 others.
    """
    counts = []
    for keys in (64, 128):
        case = Case(128, keys, kind="full", batch=1, heads=1, dim=dim, **BF16)
        statistics()
        backward(case)
        found = statistics()
        assert found.conflicting_loads == 0
        counts.append(found.matrix_loads)
    by_query, by_key = 8 * (3 * 2 + 2 * 2), 2 * 4 * (2 + 4 + 4)
    assert counts[1] - counts[0] == dim // 16 * 4 * (by_query + by_key)


@pytest.mark.parametrize("kind", ["gistpool", "random"])
def test_lists_made_on_the_device(kind: str) -> None:
    case = Case(300, 290, kind=kind, dim=64, **BF16)
    made = build_tiles(case.plan.spans, case.keys, TILE_QUERIES, TILE_KEYS)[1:]
    grads = backward(case, lists=(made[0].flat(), made[1].flat()))
    assert all(torch.equal(a, b) for a, b in zip(grads, backward(case), strict=True))


@pytest.mark.parametrize("build", ["forward"], indirect=True)
@pytest.mark.parametrize("queries,keys,batch", [(300, 290, 2), (100, 290, 1), (300, 60, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_lists_of_any_values_read_nothing_else(seed: int, queries: int, keys: int, batch: int) -> None:
    case = Case(queries, keys, batch=batch, dim=16, bias="bh", **BF16)
    key_tiles, query_tiles = lists_of(case)
    backward(case, lists=(key_tiles.spoiled(seed), query_tiles.spoiled(seed)))
