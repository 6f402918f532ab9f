"""Tile lists made on the device against lists counted pair by pair."""

from __future__ import annotations

import emulation
import pytest
import torch
from attention_cases import TileLists
from emulation import Int, Long, Pointer, mirror

from gistkit import Plan
from gistkit.ops.reference import dense_mask

pytestmark = pytest.mark.usefixtures("build")

EMPTY, PARTIAL, FULL = range(3)
TileList = mirror("TileList", ("offsets counts entries order", Pointer))
TileParams = mirror(
    "TileParams",
    ("spans normalized", Pointer),
    ("batch", Long),
    ("queries keys num_spans query_tile key_tile", Int),
    ("keys_of_queries queries_of_keys", TileList),
    ("positions", Pointer),
)


STRUCTS = (
    ("cuda/attention/tile_lists.h", "gistkit::cuda::TileList", TileList),
    ("cuda/attention/tile_lists.h", "gistkit::cuda::TileParams", TileParams),
)


class Lists:
    """Memory of one direction, filled with what no list holds."""

    def __init__(self, batch: int, tiles: int, capacity: int) -> None:
        self.offsets = torch.full((batch, tiles), -7)
        self.counts = torch.full((batch, tiles), -7, dtype=torch.int32)
        self.entries = torch.full((batch, tiles, capacity), -7, dtype=torch.int32)
        self.order = torch.full((batch * tiles,), -7, dtype=torch.int32)
        self.positions = torch.full_like(self.entries, -7)

    def params(self) -> TileList:
        return TileList(*(tensor.data_ptr() for tensor in self.tensors("").values()))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.{field}": getattr(self, field) for field in ("offsets", "counts", "entries", "order")}

    def flat(self) -> TileLists:
        """As attention takes them."""
        tensors = (tensor.flatten() for tensor in self.tensors("").values())
        return TileLists(*tensors, tiles=self.entries.shape[2])

    def kinds(self) -> torch.Tensor:
        """[batch, tiles, capacity] of EMPTY, PARTIAL, FULL; checks that lists ascend and hold nothing more."""
        batch, tiles, capacity = self.entries.shape
        kinds = torch.full((batch, tiles, capacity), EMPTY)
        assert torch.equal(self.offsets.flatten(), torch.arange(batch * tiles) * capacity)
        for b in range(batch):
            for t in range(tiles):
                count = int(self.counts[b, t])
                entries = self.entries[b, t]
                assert (entries[count:] == -7).all()
                assert ((entries[:count] // 2).diff() > 0).all()
                kinds[b, t, (entries[:count] // 2).long()] = torch.where(entries[:count] % 2 == 1, PARTIAL, FULL)
        return kinds


def build_tiles(
    spans: torch.Tensor, keys: int, query_tile: int, key_tile: int, *, both: bool = True
) -> tuple[torch.Tensor, Lists, Lists]:
    """Normalized spans and the lists of both directions for spans [batch, queries, num_spans, 2]."""
    batch, queries, num_spans, _ = spans.shape
    query_tiles, key_tiles = (max(1, -(-n // size)) for n, size in ((queries, query_tile), (keys, key_tile)))
    normalized = torch.full_like(spans, -7)
    forward, backward = Lists(batch, query_tiles, key_tiles), Lists(batch, key_tiles, query_tiles)
    params = TileParams(
        *(spans.data_ptr(), normalized.data_ptr(), batch, queries, keys, num_spans, query_tile, key_tile),
        *(forward.params(), *((backward.params(), backward.positions.data_ptr()) if both else ())),
    )
    outputs = {"normalized": normalized, **forward.tensors("keys_of_queries"), **backward.tensors("queries_of_keys")}
    outputs["positions"] = backward.positions
    library = emulation.build("tiles", ["csrc/cuda/attention/tile_lists.cu"], structs=STRUCTS)
    library.run("gistkit::cuda::build_tiles", params, inputs={"spans": spans}, outputs=outputs)
    return normalized, forward, backward


def kinds_of(mask: torch.Tensor, query_tile: int, key_tile: int) -> torch.Tensor:
    """The kind of each tile, from the mask; a cut key tile is never full, a cut query tile may be."""
    batch, queries, keys = mask.shape
    rows, columns = -queries % query_tile, -keys % key_tile
    padded = torch.nn.functional.pad(mask.float(), (0, columns)).bool()
    any_seen = torch.nn.functional.pad(padded, (0, 0, 0, rows), value=False)
    all_seen = torch.nn.functional.pad(padded, (0, 0, 0, rows), value=True)
    shape = (batch, (queries + rows) // query_tile, query_tile, (keys + columns) // key_tile, key_tile)
    some, every = any_seen.view(shape).any(4).any(2), all_seen.view(shape).all(4).all(2)
    return torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))


def assert_order(lists: Lists) -> None:
    counts, order = lists.counts.flatten(), lists.order.long()
    assert torch.equal(order, torch.sort(counts, descending=True, stable=True).indices)


def assert_positions(lists: Lists) -> None:
    """Each list that names a tile counts those before it in the order that do, within a batch row."""
    batch, tiles, capacity = lists.entries.shape
    expected, before = torch.full_like(lists.positions, -7), torch.zeros(batch, capacity, dtype=torch.int32)
    for b, t in (divmod(number, tiles) for number in lists.order.tolist()):
        named = (lists.entries[b, t, : lists.counts[b, t]] // 2).long()
        expected[b, t, named] = before[b, named]
        before[b, named] += 1
    assert torch.equal(lists.positions, expected)


def check(spans: torch.Tensor, keys: int, query_tile: int, key_tile: int) -> None:
    normalized, forward, backward = build_tiles(spans, keys, query_tile, key_tile)
    mask = dense_mask(Plan(spans, keys))
    assert torch.equal(dense_mask(Plan(normalized, keys)), mask)
    begin, end = normalized.unbind(-1)
    assert (begin[..., 1:] > end[..., :-1]).logical_or(begin[..., 1:] == keys).all()
    assert ((begin < end) | ((begin == keys) & (end == keys))).all()
    expected = kinds_of(mask, query_tile, key_tile)
    assert torch.equal(forward.kinds(), expected)
    assert torch.equal(backward.kinds(), expected.transpose(1, 2))
    assert_order(forward)
    assert_order(backward)
    assert_positions(backward)


def random_spans(batch: int, queries: int, num_spans: int, keys: int) -> torch.Tensor:
    """In any order, overlapping, some empty or beyond the keys; and runs of rows that see long ranges alike."""
    spans = torch.randint(-5, keys + 6, (batch, queries, num_spans, 2), dtype=torch.int32)
    spans[:, queries // 3 : 2 * queries // 3, 0] = torch.tensor([0, keys // 2 + 1], dtype=torch.int32)
    spans[:, queries // 2 :: 5] = 0
    return spans


@pytest.mark.parametrize(
    ("batch", "queries", "num_spans", "keys"),
    [(1, 1, 1, 1), (1, 63, 1, 65), (2, 65, 2, 200), (3, 200, 3, 63), (1, 203, 7, 203), (2, 130, 2, 1)],
)
@pytest.mark.parametrize(("query_tile", "key_tile"), [(64, 64), (128, 32), (16, 64)])
def test_random_spans(batch: int, queries: int, num_spans: int, keys: int, query_tile: int, key_tile: int) -> None:
    check(random_spans(batch, queries, num_spans, keys), keys, query_tile, key_tile)


@pytest.mark.parametrize("queries", [64, 128, 200])
def test_causal_and_full(queries: int) -> None:
    row = torch.arange(queries, dtype=torch.int32)
    causal = torch.stack([torch.zeros_like(row), row + 1], -1)[None, :, None]
    check(causal, queries, 64, 64)
    everything = torch.tensor([0, queries], dtype=torch.int32).expand(1, queries, 1, 2).contiguous()
    check(everything, queries, 64, 64)


def test_touching_spans_cover_a_tile_together() -> None:
    spans = torch.tensor([[0, 20], [20, 64]], dtype=torch.int32).expand(1, 64, 2, 2).contiguous()
    _, forward, _ = build_tiles(spans, 64, 64, 64)
    assert forward.kinds().tolist() == [[[FULL]]]


@pytest.mark.parametrize(("queries", "keys"), [(0, 65), (65, 0), (0, 0)])
def test_empty_sides(queries: int, keys: int) -> None:
    spans = torch.zeros(2, queries, 1, 2, dtype=torch.int32)
    _, forward, backward = build_tiles(spans, keys, 64, 64)
    assert not forward.counts.any() and not backward.counts.any()
    assert_order(forward)
    assert_order(backward)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_many_key_tiles_take_several_windows() -> None:
    check(random_spans(1, 40, 2, 9001), 9001, 16, 4)


def test_one_direction_alone() -> None:
    _, _, backward = build_tiles(random_spans(1, 65, 2, 65), 65, 64, 64, both=False)
    assert (backward.counts == -7).all() and (backward.entries == -7).all() and (backward.order == -7).all()


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_order_of_more_lists_than_threads() -> None:
    _, forward, backward = build_tiles(random_spans(9, 300, 1, 300), 300, 8, 8)
    assert forward.counts.numel() > 256
    assert_order(forward)
    assert_order(backward)
    assert_positions(backward)
