"""The fp32 attention kernels on a CPU, forward and backward, against the reference in fp64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_cases import STRUCTS, Case, Device, Forward, Rows, TileLists, backward_of, check, lists_of
from emulation import ORDERS, SHARED_LIMIT, Library, build
from test_tile_lists import build_tiles
from torch import Tensor

from gistkit import Plan

pytestmark = pytest.mark.usefixtures("build")

SOURCES = [f"csrc/cuda/attention/{name}.cu" for name in ("fp32", "pairwise")]
FORWARD = ("out", "lse")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
TILE_QUERIES, TILE_KEYS = 128, 64


def library() -> Library:
    return build("attention_fp32", SOURCES, structs=STRUCTS)


def forward(case: Case, *, lists: TileLists | None = None, **options: str) -> list[Tensor]:
    params, lists = Forward(), lists or lists_of(case)[0]
    case.fill(params)
    out = case.empty(case.heads, case.queries, case.value_dim)
    lse = torch.full((case.batch, case.heads, case.queries), torch.nan)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    library().run(
        "gistkit::cuda::attention_fp32_forward",
        params,
        Device(key_tiles=lists.params, splits=1, shared_limit=SHARED_LIMIT),
        inputs={**case.inputs("query", "key", "value", "key_bias"), **lists.tensors("key_tiles")},
        outputs={"out": out, "lse": lse},
        **options,
    )
    return [out, lse]


def backward(
    case: Case,
    out: Tensor,
    lse: Tensor,
    *,
    lists: tuple[TileLists, TileLists] | None = None,
    **options: str,
) -> list[Tensor]:
    """[grad_query, grad_key, grad_value] and with a bias its gradient."""
    params, grads = backward_of(case, out, lse)
    key_tiles, query_tiles = lists or lists_of(case)
    kernels = library()
    size = kernels.function("gistkit::cuda::attention_fp32_workspace")
    size.restype = ctypes.c_int64
    workspace = torch.full((size(ctypes.c_void_p(ctypes.addressof(params))) // 4,), torch.nan)
    kernels.run(
        "gistkit::cuda::attention_fp32_backward",
        params,
        Device(key_tiles.params, query_tiles.params, 1, SHARED_LIMIT, workspace.data_ptr()),
        inputs={
            **case.inputs("query", "key", "value", "key_bias", "grad_out", "grad_lse"),
            **key_tiles.tensors("key_tiles"),
            **query_tiles.tensors("query_tiles"),
            "out": out,
            "lse": lse,
        },
        outputs={**grads, "workspace": workspace},
        **options,
    )
    return list(grads.values())


def check_both(case: Case) -> None:
    out, lse = forward(case)
    check(case, [out, lse], FORWARD)
    grads = backward(case, out, lse)
    check(case, grads, (*GRADIENTS, "grad_key_bias")[: len(grads)])


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize("length", [1, 63, 65, 203])
def test_parity(length: int, kind: str) -> None:
    check_both(Case(length, kind=kind, batch=1, dim=24))


CASES = {
    "gqa": Case(70, 111, heads=4, key_heads=2, dim=33, value_dim=17),
    "wide": Case(37, 70, heads=1, dim=256, value_dim=130),
    "narrow": Case(40, 70, dim=1, value_dim=3),
    "cap": Case(67, 130, dim=20, softcap=3.0),
    "bias": Case(67, 130, dim=20, bias="bh"),
    "shared bias": Case(67, 130, dim=20, bias="h", softcap=2.0),
    "infinite bias": Case(67, 66, dim=20, bias="i", kind="causal"),
    "tokens": Case(50, 70, dim=20, layout="tokens"),
    "odd": Case(50, 70, dim=20, layout="odd"),
    "many tiles": Case(300, 290, heads=4, key_heads=2, batch=2, dim=40, value_dim=60, bias="bh", softcap=2.0),
    "many shared tiles": Case(290, 300, kind="dodo", dim=68, bias="b"),
    "many causal tiles": Case(321, kind="causal", batch=1, dim=100, value_dim=128),
    "many tiles of wide heads": Case(200, 210, kind="causal", batch=1, dim=136, value_dim=196, softcap=5.0),
    "unaligned wide heads": Case(140, 70, dim=200, value_dim=150, layout="odd"),
    "few keys": Case(33, 5, dim=130),
    "one query": Case(1, 300, kind="full", heads=4, key_heads=2, dim=64),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str) -> None:
    check_both(CASES[name])


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("case", [Case(67, 70, dim=34, bias="b"), Case(150, 130, kind="causal", batch=1, dim=68)])
def test_same_bits_in_any_order(case: Case) -> None:
    first = forward(case)
    first += backward(case, *first)
    for order in ORDERS[1:]:
        again = [*forward(case, order=order), *backward(case, *first[:2], order=order)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_rows_without_keys() -> None:
    """Output 0, lse -inf, no gradient, whatever comes from above."""
    case = Case(50, 40, dim=8, bias="b")
    case.plan.spans[:] = 0
    case.plan.spans[:, 1, 0] = torch.tensor([1, 2])
    case.tensors["key_bias"][..., 1] = -torch.inf
    case.tensors["grad_out"][:] = torch.nan
    out, lse = forward(case)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in backward(case, out, lse))


def test_unseen_keys_may_hold_anything() -> None:
    case = Case(50, 90, dim=8)
    case.plan.spans.clamp_(max=70)
    alone = Case(50, 90, dim=8)
    alone.plan.spans.clamp_(max=70)
    for name in ("key", "value"):
        case.tensors[name][:, :, 70:] = torch.nan
    out, lse = forward(case)
    expected = forward(alone)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for mine, other in zip(backward(case, out, lse), backward(alone, out, lse), strict=True):
        assert torch.equal(mine, other)


def test_tiles_that_no_list_names_are_not_read() -> None:
    """Rows see the first and the last keys: what lies between may hold anything."""
    case, alone = (Case(150, 300, kind="full", batch=1, dim=12) for _ in range(2))
    for each in (case, alone):
        spans = torch.tensor([[0, 64], [192, 290]], dtype=torch.int32).expand(1, 150, 2, 2).clone()
        each.plan = Plan(spans, 300)
    for name in ("key", "value"):
        case.tensors[name][:, :, 64:192] = torch.nan
    assert lists_of(case)[0].counts.tolist() == [3, 3]
    out, lse = forward(case)
    expected = forward(alone)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    by_query, by_key, by_value = backward(case, out, lse)
    right = backward(alone, out, lse)
    assert torch.equal(by_query, right[0])
    assert torch.equal(by_key, right[1]) and torch.equal(by_value, right[2])


@pytest.mark.parametrize("kind", ["gistpool", "causal", "random"])
def test_lists_from_the_device(kind: str) -> None:
    case = Case(300, 290, kind=kind, dim=20)
    by_query, by_key = build_tiles(case.plan.spans, case.keys, TILE_QUERIES, TILE_KEYS)[1:]
    out, lse = forward(case)
    made = forward(case, lists=by_query.flat())
    assert torch.equal(out, made[0]) and torch.equal(lse, made[1])
    grads = backward(case, out, lse, lists=(by_query.flat(), by_key.flat()))
    assert all(torch.equal(a, b) for a, b in zip(grads, backward(case, out, lse), strict=True))


def all_tiles(lists: TileLists, tiles: int) -> TileLists:
    """Every tile, and each looked at pair by pair."""
    entries = torch.arange(tiles, dtype=torch.int32).mul(2).add(1).repeat(len(lists.counts))
    offsets = torch.arange(len(lists.counts)) * tiles
    return TileLists(offsets, torch.full_like(lists.counts, tiles), entries, lists.order, tiles)


def test_tiles_without_pairs_and_masks_of_full_tiles_change_no_bit() -> None:
    """Causal rows: full, partial and empty tiles, and halves of tiles that are empty."""
    case = Case(321, kind="causal", dim=20, heads=2)
    lists = lists_of(case)
    begins = zip(lists[0].offsets.tolist(), lists[0].counts.tolist(), strict=True)
    kinds = {int(entry) % 2 for begin, count in begins for entry in lists[0].entries[begin : begin + count]}
    assert kinds == {0, 1} and lists[0].counts.min() < 6 and lists[1].counts.min() < 3
    more = all_tiles(lists[0], 6), all_tiles(lists[1], 3)
    out, lse = forward(case)
    slow = forward(case, lists=more[0])
    assert torch.equal(out, slow[0]) and torch.equal(lse, slow[1])
    grads = backward(case, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(grads, backward(case, out, lse, lists=more), strict=True))


def broken(lists: TileLists, how: str) -> TileLists:
    """The first list without its last entry, or with a partial tile called full."""
    counts, entries = lists.counts.clone(), lists.entries.clone()
    if how == "short":
        counts[0] -= 1
    else:
        first = lists.offsets[int((entries[lists.offsets] % 2 == 1).nonzero()[0])]
        entries[first] -= 1
    return TileLists(lists.offsets, counts, entries, lists.order, lists.tiles)


@pytest.mark.parametrize("how", ["short", "full"])
def test_the_lists_decide_what_is_looked_at(how: str) -> None:
    """A wrong list shows, in each kernel for itself."""
    case = Case(200, 150, dim=16, batch=1)
    by_query, by_key = lists_of(case)
    out, lse = forward(case)
    assert not torch.equal(forward(case, lists=broken(by_query, how))[0], out)
    right = backward(case, out, lse)
    for wrong, changed in (((broken(by_query, how), by_key), 0), ((by_query, broken(by_key, how)), 2)):
        grads = backward(case, out, lse, lists=wrong)
        same = [torch.equal(a, b) for a, b in zip(grads, right, strict=True)]
        assert not same[changed] and same[2 - changed]


@pytest.mark.parametrize("build", ["forward"], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_spoiled_lists_read_nothing_else(seed: int) -> None:
    case = Case(300, 290, kind="random", dim=20)
    by_query, by_key = lists_of(case)
    forward(case, lists=by_query.spoiled(seed))
    out, lse = forward(case)
    lists = by_query.spoiled(seed), by_key.spoiled(seed)
    backward(case, out, lse, lists=lists)


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int) -> None:
    case = Case(queries, keys, dim=8)
    out, lse = forward(case)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in backward(case, out, lse))
