"""The fp32 attention kernels on a CPU: that the lists of tiles decide what is looked at."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, TileLists, lists_of
from attention_kernels import FP32, backward, forward

from gistkit import Plan

pytestmark = pytest.mark.usefixtures("build")


def test_tiles_that_no_list_names_are_not_read() -> None:
    """Rows see the first and the last keys: what lies between may hold anything."""
    case, alone = (Case(150, 300, kind="full", batch=1, dim=12) for _ in range(2))
    for each in (case, alone):
        spans = torch.tensor([[0, 64], [192, 290]], dtype=torch.int32).expand(1, 150, 2, 2).clone()
        each.plan = Plan(spans, 300)
    for name in ("key", "value"):
        case.tensors[name][:, :, 64:192] = torch.nan
    assert lists_of(case)[0].counts.tolist() == [3, 3]
    out, lse = forward(case, FP32)
    expected = forward(alone, FP32)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    by_query, by_key, by_value = backward(case, FP32, results=(out, lse))
    right = backward(alone, FP32, results=(out, lse))
    assert torch.equal(by_query, right[0])
    assert torch.equal(by_key, right[1]) and torch.equal(by_value, right[2])


def test_empty_tiles_and_masks_of_full_ones_change_no_bit() -> None:
    case = Case(321, kind="causal", dim=20, heads=2)
    lists, tiles = lists_of(case)[0], 6
    entries = torch.arange(tiles, dtype=torch.int32).mul(2).add(1).repeat(len(lists.counts))
    offsets = torch.arange(len(lists.counts)) * tiles
    every = TileLists(offsets, torch.full_like(lists.counts, tiles), entries, lists.order, tiles)
    assert lists.tiles == tiles > lists.counts.min() and 0 in lists.entries[lists.offsets] % 2
    assert all(map(torch.equal, forward(case, FP32), forward(case, FP32, lists=every)))


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
    out, lse = forward(case, FP32)
    assert not torch.equal(forward(case, FP32, lists=broken(by_query, how))[0], out)
    right = backward(case, FP32, results=(out, lse))
    for wrong, changed in (((broken(by_query, how), by_key), 0), ((by_query, broken(by_key, how)), 2)):
        grads = backward(case, FP32, results=(out, lse), lists=wrong)
        same = [torch.equal(a, b) for a, b in zip(grads, right, strict=True)]
        assert not same[changed] and same[2 - changed]
