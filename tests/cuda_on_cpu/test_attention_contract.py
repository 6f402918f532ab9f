"""What every kernel of attention promises, forward and backward, on a CPU, against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, lists_of
from attention_kernels import (
    AMPERE,
    FP32,
    HOPPER,
    TILE_KEYS,
    TILE_QUERIES,
    WGMMA,
    backward,
    check_backward,
    check_forward,
    forward,
    path,
)
from emulation import ORDERS
from test_tile_lists import build_tiles
from torch import Tensor

from gistkit.ops import reference

pytestmark = pytest.mark.usefixtures("build")
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = {FP32: (torch.float32,), AMPERE: (BF16, FP16), HOPPER: (BF16, FP16)}

# Halves are bfloat16 unless said. Most have the rows that wgmma's kernels want.
CASES = {
    "float16": {"queries": 130, "keys": 150, "dim": 64, "dtype": FP16},
    "gqa": {"queries": 203, "keys": 150, "heads": 4, "key_heads": 2, "dim": 40},
    "mqa": {"queries": 140, "keys": 260, "heads": 3, "batch": 1, "dim": 128},
    "packed heads": {"queries": 50, "keys": 150, "heads": 6, "key_heads": 2, "dim": 64, "dtype": FP16},
    "no lists shared": {"queries": 200, "keys": 140, "batch": 3, "heads": 1, "dim": 40},
    "narrow": {"queries": 70, "keys": 90, "dim": 5, "value_dim": 3},
    "1": {"queries": 40, "keys": 70, "dim": 1, "value_dim": 3},
    "8": {"queries": 200, "keys": 140, "batch": 1, "heads": 1, "dim": 8},
    "72": {"queries": 150, "keys": 130, "batch": 1, "heads": 1, "dim": 72},
    "96": {"queries": 150, "keys": 130, "batch": 1, "heads": 1, "dim": 96},
    "128": {"queries": 203, "keys": 150, "batch": 1, "dim": 128},
    "128 causal": {"queries": 200, "kind": "causal", "batch": 1, "dim": 128, "dtype": FP16},
    "40-24": {"queries": 130, "keys": 190, "dim": 40, "value_dim": 24},
    "48-128": {"queries": 130, "keys": 190, "heads": 1, "dim": 48, "value_dim": 128},
    "192-128": {"queries": 150, "keys": 130, "batch": 1, "heads": 1, "dim": 192, "value_dim": 128},
    "192-128 group": {
        "queries": 130, "keys": 70, "batch": 1, "dim": 180, "value_dim": 100, "bias": "h", "softcap": 4.0,
    },
    "256": {"queries": 150, "keys": 130, "batch": 1, "heads": 1, "dim": 256},
    "cap": {"queries": 130, "keys": 140, "dim": 64, "softcap": 3.0},
    "bias": {"queries": 130, "keys": 140, "dim": 64, "bias": "bh"},
    "shared bias": {"queries": 130, "keys": 140, "dim": 64, "bias": "b", "dtype": FP16},
    "bias of groups": {"queries": 130, "keys": 140, "dim": 128, "heads": 4, "key_heads": 2, "bias": "h"},
    "bias of packed heads": {"queries": 40, "keys": 70, "heads": 6, "key_heads": 2, "dim": 64, "bias": "h"},
    "shared bias of packed heads": {"queries": 40, "keys": 70, "heads": 6, "key_heads": 2, "dim": 64, "bias": "b"},
    "bias and cap": {"queries": 130, "keys": 140, "dim": 128, "bias": "h", "softcap": 2.0},
    "infinite bias": {"queries": 130, "keys": 131, "dim": 64, "bias": "i", "kind": "causal"},
    "tokens first": {"queries": 140, "keys": 190, "dim": 64, "heads": 4, "key_heads": 2, "layout": "tokens"},
    "unaligned": {"queries": 140, "keys": 70, "dim": 64, "layout": "odd", "dtype": FP16},
    "unaligned, narrow": {"queries": 140, "keys": 70, "dim": 20, "value_dim": 7, "layout": "odd"},
    "unaligned, wide": {"queries": 70, "keys": 70, "heads": 1, "dim": 180, "value_dim": 130, "layout": "odd"},
    "recent and far": {"queries": 203, "keys": 200, "batch": 1, "heads": 1, "kind": "dodo", "dim": 64},
    "many tiles": {"queries": 400, "keys": 700, "batch": 1, "heads": 1, "dim": 64},
    "many shared tiles": {"queries": 290, "keys": 300, "kind": "dodo", "dim": 68, "bias": "b"},
    "many causal tiles of wide heads": {
        "queries": 200, "keys": 210, "kind": "causal", "batch": 1, "dim": 136, "value_dim": 196, "softcap": 5.0,
    },
    "few keys": {"queries": 33, "keys": 5, "dim": 130},
    "one query": {"queries": 1, "keys": 300, "kind": "full", "heads": 4, "key_heads": 2, "dim": 64},
    "one": {"queries": 1, "keys": 1, "dim": 8},
}  # fmt: skip


@pytest.fixture(params=[FP32, AMPERE, HOPPER], ids=["fp32", "ampere", "hopper"])
def capability(request: pytest.FixtureRequest) -> int:
    return request.param


def made(capability: int, *sizes: int, dtype: torch.dtype = BF16, **options: object) -> Case:
    return Case(*sizes, dtype=torch.float32 if capability == FP32 else dtype, **options)


def of(name: str, capability: int) -> Case:
    return made(capability, **CASES[name])


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check_both(case: Case, capability: int) -> None:
    """What a device with wgmma leaves to other kernels is looked at on a device without."""
    for direction, check in (("forward", check_forward), ("backward", check_backward)):
        if capability != HOPPER or path(direction, case) == WGMMA:
            check(case, capability)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize("length", [1, 63, 65, 128, 200, 203])
def test_parity(length: int, kind: str, capability: int) -> None:
    for dtype in DTYPES[capability]:
        for dim in (24,) if capability == FP32 else (64, 128):
            case = Case(length, kind=kind, batch=1, heads=length % 2 + 1, dim=dim, dtype=dtype)
            check_forward(case, capability)
            if dtype != FP16 and (capability != HOPPER or length >= 128):
                check_backward(case, capability)


@pytest.mark.parametrize("name", CASES)
def test_options(name: str, capability: int) -> None:
    check_both(of(name, capability), capability)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_wgmma_takes_many_of_the_options() -> None:
    for direction in ("forward", "backward"):
        assert sum(path(direction, of(name, HOPPER)) == WGMMA for name in CASES) >= 16


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["128", "256", "bias of groups", "recent and far", "many tiles"])
def test_same_bits_in_any_order(name: str, capability: int) -> None:
    case = of(name, capability)
    first = [*forward(case, capability), *backward(case, capability)]
    for order in ORDERS[1:]:
        assert same([*forward(case, capability, order=order), *backward(case, capability, order=order)], first)


def test_rows_without_keys(capability: int) -> None:
    """Out 0, lse -inf and no gradient, whatever comes from above, also where the only key has a bias of -inf."""
    case = made(capability, 130, 140, dim=64, bias="b")
    case.plan.spans[:] = 0
    case.plan.spans[:, 1, 0] = torch.tensor([1, 2])
    case.tensors["key_bias"][..., 1] = -torch.inf
    case.tensors["grad_out"][:] = torch.nan
    for splits in (1,) if capability == FP32 else (1, 3):
        out, lse = forward(case, capability, splits=splits)
        assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in backward(case, capability))
    # Other rows of the tile keep theirs.
    case = made(capability, 150, 160, dim=64)
    expected = backward(case, capability)
    case.tensors["grad_out"][~reference.dense_mask(case.plan).any(-1)[:, None].expand(-1, 2, -1)] = torch.nan
    assert case.tensors["grad_out"].isnan().any() and same(backward(case, capability), expected)


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int, capability: int) -> None:
    case = made(capability, queries, keys, dim=8, bias="h")
    out, lse = forward(case, capability)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in backward(case, capability))


@pytest.mark.parametrize("queries", [1, 140])
def test_keys_that_no_row_sees_may_hold_anything(queries: int, capability: int) -> None:
    """As a cache's unused ends do. Gradients of halves that turn NaN by it are done again pair by pair."""
    case, outs, grads = made(capability, queries, 300, dim=64), [], []
    case.plan.spans.clamp_(30, 200)
    for rest in (0, torch.nan):
        for name in ("key", "value"):
            case.tensors[name][:, :, :30] = case.tensors[name][:, :, 200:] = rest
        outs.append(forward(case, capability))
        grads.append(backward(case, capability))
    assert same(*outs)
    if capability == FP32:
        assert same(*grads)
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("kind", ["gistpool", "causal", "random"])
def test_lists_made_on_the_device(kind: str, capability: int) -> None:
    case = made(capability, 300, 290, kind=kind, dim=64)
    lists = tuple(its.flat() for its in build_tiles(case.plan.spans, case.keys, TILE_QUERIES, TILE_KEYS)[1:])
    assert same(forward(case, capability, lists=lists[0]), forward(case, capability))
    assert same(backward(case, capability, lists=lists), backward(case, capability))


@pytest.mark.parametrize("build", ["forward"], indirect=True)
@pytest.mark.parametrize("queries,keys,batch", [(300, 290, 2), (100, 290, 1), (300, 60, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_lists_of_any_values_read_nothing_else(seed: int, queries: int, keys: int, batch: int, capability: int) -> None:
    case = made(capability, queries, keys, batch=batch, dim=16, bias="bh")
    by_query, by_key = (lists.spoiled(seed) for lists in lists_of(case))
    forward(case, capability, lists=by_query, splits=1 + seed * (capability == AMPERE))
    backward(case, capability, lists=(by_query, by_key))
