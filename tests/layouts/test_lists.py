"""Lists of tiles that a plan takes to a GPU: against lists counted pair by pair, and when they are made anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gistkit import Plan, _gpu, layouts
from gistkit.layouts.lists import TileLists, lists_on
from gistkit.ops.reference import dense_mask

TILE_QUERIES, TILE_KEYS = 128, 64
Lists = list[list[int]]


def unpacked(row: Tensor, count: int) -> tuple[Lists, list[int]]:
    """The entries of each list, and the order."""
    offsets, row = row[: 2 * count].view(torch.int64).tolist(), row[2 * count :].tolist()
    counts, order, entries = row[:count], row[count : 2 * count], row[2 * count :]
    return [entries[at : at + size] for at, size in zip(offsets, counts, strict=True)], order


def counted(mask: Tensor, height: int, width: int) -> Lists:
    """From bool [B, rows, columns]: for each tile of rows, the tiles of columns with a visible pair."""
    found = []
    for one in mask:
        for strip in one.split(height):
            tiles = enumerate(strip.split(width, 1))
            found.append([2 * i + (not bool(tile.all())) for i, tile in tiles if bool(tile.any())])
    return found


def random_spans(batch: int, rows: int, width: int, keys: int) -> Tensor:
    """In any order, overlapping, some empty; runs of rows that see long ranges alike."""
    spans = torch.randint(0, keys + 1, (batch, rows, width, 2), dtype=torch.int32)
    spans[:, rows // 4 : 3 * rows // 4, 0] = torch.tensor([0, keys - 1], dtype=torch.int32)
    return spans


@pytest.mark.parametrize(
    ("batch", "rows", "width", "keys"), [(1, 1, 1, 1), (2, 300, 2, 290), (3, 129, 1, 640), (2, 140, 15, 3000)]
)
def test_lists_are_exact(batch: int, rows: int, width: int, keys: int) -> None:
    spans = random_spans(batch, rows, width, keys)
    lists = lists_on(spans, keys, spans)
    mask = dense_mask(Plan(spans, keys))
    assert torch.equal(dense_mask(Plan(lists.spans, keys)), mask)
    begin, end = lists.spans.unbind(-1)
    assert ((begin[..., 1:] > end[..., :-1]) | (begin[..., 1:] == keys)).all()
    sides = (mask, TILE_QUERIES, TILE_KEYS), (mask.transpose(1, 2), TILE_KEYS, TILE_QUERIES)
    for row, side in zip(lists.tiles, sides, strict=True):
        expected = counted(*side)
        entries, order = unpacked(row, len(expected))
        assert entries == expected
        assert order == sorted(range(len(expected)), key=lambda i: -len(expected[i]))
        # Kernels bound what they read by a whole list behind the last offset.
        most = -(-side[0].shape[2] // side[2])
        assert len(row) >= 4 * len(expected) + sum(map(len, expected)) + most and len(row) % 2 == 0


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(rows: int, keys: int) -> None:
    spans = torch.zeros(2, rows, 1, 2, dtype=torch.int32)
    for row, count in zip(lists_on(spans, keys, spans).tiles, (2, 2), strict=True):
        assert unpacked(row, count) == ([[], []], [0, 1])


def test_what_is_kept_follows_what_is_seen() -> None:
    """Not the grid of all tiles: 65536 rows of Dodo see 2% of it."""
    plan = layouts.dodo((torch.arange(65536) % 20 == 0).numpy(), 64).compile()
    kept = lists_on(plan.spans, plan.num_keys, plan.spans).tiles.numel()
    assert kept < 2 * 512 * 1024 / 8


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The meta device stands for a GPU: tensors there have no values, and nobody asks for them."""
    monkeypatch.setattr(_gpu, "on_gpu", lambda tensor: tensor.is_meta)
    monkeypatch.setattr(_gpu, "stream_of", lambda tensor: 7)
    return


@pytest.mark.usefixtures("gpu")
def test_a_plan_takes_its_lists_along() -> None:
    plan = layouts.gistpool(300, 8, 40).compile(windows=(64,)).to("meta")
    lists = plan._lists
    assert lists is not None and lists.tiles.is_meta and lists.tiles.shape[0] == 2
    assert lists.serve(plan.spans, True)
    cut = plan.windowed[64]
    assert cut._lists is not None and cut._lists.serve(cut.spans, True)
    assert not lists.serve(cut.spans, True)
    assert plan.to("meta")._lists is lists


@pytest.mark.usefixtures("gpu")
def test_lists_of_other_spans_are_never_taken() -> None:
    plan = layouts.causal(300).compile().to("meta")
    assert plan._lists is not None
    assert replace(plan, spans=plan.spans.clone())._lists is None
    assert plan.rows(10, 200)._lists is None
    assert plan.with_windows({8: plan.spans.clone()}).windowed[8]._lists is None
    with pytest.raises((TypeError, ValueError), match="_lists"):
        replace(plan, spans=plan.spans.clone(), _lists=plan._lists)
    # Past a frozen dataclass: other spans under the same plan, and the same spans with other values.
    object.__setattr__(plan, "spans", plan.spans.clone())
    assert not plan._lists.serve(plan.spans, False)
    plan = layouts.causal(300).compile().to("meta")
    plan.spans.add_(1)
    assert plan._lists is not None and not plan._lists.serve(plan.spans, False)


@pytest.mark.usefixtures("gpu")
def test_lists_serve_what_they_were_made_for() -> None:
    spans = layouts.causal(300).compile().spans
    tiles = torch.zeros(1, 8, dtype=torch.int32)
    one = TileLists(spans, spans._version, spans, tiles, stream=7)
    assert one.serve(spans, False) and not one.serve(spans, True)
    assert not TileLists(spans, spans._version, spans, tiles, stream=8).serve(spans, False)
    with torch.inference_mode():
        kept = layouts.causal(300).compile().to("meta")
        assert kept._lists is not None and kept._lists.serve(kept.spans, True)


def test_a_plan_on_the_cpu_has_none() -> None:
    plan = Plan.from_spans(torch.tensor([[[0, 1]]], dtype=torch.int32), 1)
    assert plan.to("cpu")._lists is None
