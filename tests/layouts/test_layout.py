"""Compiled plans against the dense oracle, for random layouts; plans' other parts; error messages."""

import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit import _planner, layouts
from gistkit.layouts import (
    ALL,
    CAUSAL,
    SEGMENT,
    SEGMENT_CAUSAL,
    SELF,
    Layout,
    Plan,
    Relation,
    Role,
    compile_batch,
    older,
    recent,
    windows,
    windows_causal,
)

sized = st.integers(1, 12)
relations = st.one_of(
    st.sampled_from([ALL, CAUSAL, SEGMENT, SEGMENT_CAUSAL, SELF]),
    sized.map(windows),
    sized.map(windows_causal),
    sized.map(recent),
    sized.map(older),
)
visible_roles = [role for role in Role if role is not Role.PAD]


@st.composite
def random_layouts(draw: st.DrawFn, max_tokens: int = 40) -> Layout:
    roles, segments, documents, ordinals = [], [], [], []
    document = 0
    for _ in range(draw(st.integers(1, 3))):
        document += draw(st.integers(1, 3))
        count = draw(st.integers(1, max_tokens // 3))
        mine = draw(st.lists(st.sampled_from(Role), min_size=count, max_size=count))
        roles += mine
        documents += [document] * count
        segment = dict.fromkeys(Role, 0)
        ordinal = draw(st.integers(0, 3))
        for role in mine:
            segment[role] += draw(st.sampled_from([0, 0, 0, 1, 2]))
            segments.append(segment[role])
            ordinals.append(ordinal)
            ordinal += draw(st.sampled_from([1, 1, 1, 2, 5]))
    entries = st.one_of(relations, st.lists(relations, min_size=1, max_size=3).map(tuple))
    table = st.dictionaries(
        st.sampled_from(visible_roles), st.dictionaries(st.sampled_from(visible_roles), entries), max_size=5
    )
    return Layout(roles=roles, segments=segments, documents=documents, ordinals=ordinals, sees=draw(table))


def mask_of(spans: torch.Tensor, num_keys: int) -> np.ndarray:
    """bool [Nq, Nk] from spans [Nq, S, 2], checking that they are in range, ascending, disjoint, merged, empty last."""
    mask = np.zeros((spans.shape[0], num_keys), bool)
    for row, intervals in enumerate(spans.tolist()):
        seen = -1
        for i, (start, end) in enumerate(intervals):
            if start == end:
                assert all(s == e for s, e in intervals[i:])
                break
            assert seen < start < end <= num_keys
            seen = end
            mask[row, start:end] = True
    return mask


@given(layout=random_layouts(), window=st.none() | sized, grouped=st.booleans(), data=st.data())
def test_spans_equal_the_dense_mask(layout: Layout, window: int | None, grouped: bool, data: st.DataObject) -> None:
    plan = layout.compile(window=window, grouped=grouped)
    expected = layout.dense_mask("physical" if grouped else "logical", window)
    assert (mask_of(plan.spans[0], len(layout)) == expected).all()
    used = (plan.spans[0, ..., 0] < plan.spans[0, ..., 1]).sum(-1).max()
    assert plan.spans.shape == (1, len(layout), max(1, int(used)), 2)
    order = plan.order[0].numpy()
    assert sorted(order) == list(range(len(layout)))
    assert (np.diff(order) == 1).all() or grouped
    assert (plan.positions.numpy() == layout.positions[order]).all()

    queries = data.draw(st.lists(st.integers(0, len(layout) - 1), unique=True))
    some = layout.compile(window=window, grouped=grouped, queries=np.array(queries, int))
    rows = [row for row, logical in enumerate(order) if logical in queries]
    assert (mask_of(some.spans[0], len(layout)) == expected[rows]).all()
    assert (some.order[0].numpy() == order[rows]).all()
    assert (some.positions.numpy() == plan.positions.numpy()[rows]).all()
    assert some.num_keys == len(layout)


@pytest.mark.parametrize(
    ("relation", "seen"),
    [
        (ALL, {0, 1, 2, 3, 4, 5, 6, 7}),
        (CAUSAL, {0, 1, 2, 3, 4, 5}),
        (SEGMENT, {4, 5, 6}),
        (SEGMENT_CAUSAL, {4, 5}),
        (SELF, {5}),
        (windows(2), {2, 3, 4, 5, 6}),
        (windows_causal(2), {2, 3, 4, 5}),
        (recent(3), {3, 4, 5}),
        (older(2), {0, 1, 2, 3}),
    ],
    ids=repr,
)
def test_what_the_sixth_of_eight_tokens_sees(relation: Relation, seen: set[int]) -> None:
    layout = Layout(roles=[Role.TEXT] * 8, segments=[0, 0, 1, 1, 2, 2, 2, 3], sees={Role.TEXT: {Role.TEXT: relation}})
    assert set(np.flatnonzero(layout.dense_mask()[5])) == seen


ONE_ROLE = {Role.TEXT: {Role.TEXT: CAUSAL}}
# Runs of one role are single tokens, and those of both together reach back to the first.
TWO_ROLES = {role: {Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL} for role in (Role.MEMORY, Role.TEXT)}


@pytest.mark.parametrize(("roles", "sees"), [([Role.TEXT], ONE_ROLE), ([Role.MEMORY, Role.TEXT], TWO_ROLES)])
def test_interleaved_plans_take_as_long_as_their_intervals_are_many(roles: list[Role], sees: dict) -> None:
    def seconds(tokens: int) -> float:
        layout = Layout(roles=roles * (tokens // len(roles)), sees=sees)
        times = []
        for _ in range(7):
            start = time.thread_time()
            spans = layout.compile(grouped=False).spans
            times.append(time.thread_time() - start)
        assert (spans[0, :, 0] == torch.stack([torch.zeros(tokens), torch.arange(1, tokens + 1)], -1)).all()
        assert spans.shape[2] == 1
        return min(times)

    # Eight times as long, and 64 times where each row walks through its keys.
    assert seconds(160_000) < 23 * seconds(20_000)


@settings(max_examples=40)
@given(layout=random_layouts(), index=st.data())
def test_taken_tokens_see_what_they_saw(layout: Layout, index: st.DataObject) -> None:
    keep = np.array(index.draw(st.lists(st.booleans(), min_size=len(layout), max_size=len(layout))))
    keep[0] = True
    part = layout.take(keep)
    assert (part.dense_mask() == layout.dense_mask()[np.ix_(keep, keep)]).all()
    assert (mask_of(part.compile().spans[0], len(part)) == part.dense_mask("physical")).all()


@settings(max_examples=40)
@given(data=st.data(), count=st.integers(0, 30))
def test_planner_survives_any_arrays(data: st.DataObject, count: int) -> None:
    def array(dtype: type, low: int, high: int, *shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        values = data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return np.array(values, dtype).reshape(shape)

    table = np.concatenate([array(np.int64, 0, 4, 6, 2), array(np.int64, -1, 2**62 - 1, 6, 3)], 1)
    tokens = (
        array(np.uint8, 0, 5, count),
        array(np.int32, -(2**31), 2**31 - 1, count),
        array(np.int32, -1, 1, count),
        array(np.int64, 0, 2**63 - 1, count),
    )
    for grouped in (True, False):
        order, spans = _planner.compile(*tokens, table, grouped=grouped)
        assert sorted(order.tolist()) == list(range(count))
        assert ((spans >= 0) & (spans <= count)).all()


def test_ragged_batch() -> None:
    rows = [layouts.gistpool(13, 4, 5), layouts.causal(3), layouts.gist(4, 2, 2)]
    plan = compile_batch(rows, window=6)
    longest = max(map(len, rows))
    assert plan.num_keys == longest
    assert plan.lengths.tolist() == [len(row) for row in rows]
    assert plan.slices is None
    for i, row in enumerate(rows):
        expected = np.zeros((longest, longest), bool)
        expected[: len(row), : len(row)] = row.dense_mask("physical", 6)
        assert (mask_of(plan.spans[i], longest) == expected).all()
        single = row.compile()
        assert plan.positions[i].tolist() == single.positions.tolist() + [0] * (longest - len(row))
        assert plan.order[i].tolist() == single.order[0].tolist() + list(range(len(row), longest))
    ids = torch.arange(3 * longest).view(3, longest, 1).expand(3, longest, 2)
    physical = plan.arrange(ids)
    assert (physical[..., 0] == ids[..., 0].take_along_dim(plan.order, 1)).all()
    assert (plan.restore(physical) == ids).all()
    heads = ids.transpose(1, 2)
    assert (plan.restore(plan.arrange(heads, dim=2), dim=2) == heads).all()


def test_batch_of_equal_rows_keeps_slices_and_axes() -> None:
    row = layouts.gist(4, 2, 3)
    assert compile_batch([row, row]).slices == row.compile().slices
    image = Layout(roles=row.roles, sees=row.sees, positions=np.tile(np.arange(len(row)) / 2, (2, 1)))
    plan = compile_batch([image, image.take(slice(0, 5))])
    assert plan.positions.shape == (2, 2, len(row))
    assert plan.positions.dtype == torch.float64
    assert plan.positions[:, 0].tolist() == image.positions.tolist()
    assert image.compile().positions.shape == (2, 1, len(row))


def test_batch_queries_pad_with_rows_that_see_nothing() -> None:
    rows = [layouts.causal(9), layouts.causal(4)]
    plan = compile_batch(rows, queries=slice(3, None))
    assert plan.lengths.tolist() == [6, 1]
    assert plan.spans[1, :, 0].tolist() == [[0, 4]] + [[0, 0]] * 5
    assert plan.num_keys == 9


def test_packed_documents_do_not_see_each_other() -> None:
    parts = [layouts.gistpool(7, 3, 2), layouts.gistpool(3, 3, 4), layouts.gistpool(9, 3, 1)]
    packed = Layout.pack(parts)
    expected = np.zeros((len(packed), len(packed)), bool)
    at = 0
    for part in parts:
        expected[at : at + len(part), at : at + len(part)] = part.dense_mask()
        at += len(part)
    assert (packed.dense_mask() == expected).all()
    assert packed.positions.tolist() == [p for part in parts for p in part.positions.tolist()]
    plan = packed.compile()
    assert (mask_of(plan.spans[0], len(packed)) == packed.dense_mask("physical")).all()
    assert plan.slices is None
    twice = Layout.pack([packed, parts[0]])
    assert np.unique(twice.documents).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_may_be_of_different_methods(window: int | None) -> None:
    parts = [
        layouts.gistpool(7, 3, 2),
        layouts.avgpool(5, 2, 3),
        layouts.voco(4, 2, 3, before=1, gap=1),
        layouts.causal(1),
    ]
    parts += [layouts.dodo(np.arange(9) % 3 == 0, 4), layouts.dodo(np.arange(6) % 4 == 0, 4)]
    packed = Layout.pack(parts, name="all")
    bounds = np.cumsum([0, *map(len, parts)])
    expected = np.zeros((len(packed), len(packed)), bool)
    for part, at, end in zip(parts, bounds, bounds[1:], strict=False):
        expected[at:end, at:end] = part.dense_mask(window=window)
    assert (packed.dense_mask(window=window) == expected).all()
    for grouped, order in ((True, "physical"), (False, "logical")):
        plan = packed.compile(window=window, grouped=grouped)
        assert (mask_of(plan.spans[0], len(packed)) == packed.dense_mask(order, window)).all()
    some = packed.compile(window=window, queries=slice(9, 30))
    assert (mask_of(some.spans[0], len(packed)) == packed.dense_mask("physical", window)[np.isin(
        packed.compile().order[0], np.arange(9, 30))]).all()  # fmt: skip
    # What remains of it keeps the tables of the documents that remain.
    last = packed.take(slice(int(bounds[1]), None))
    assert (last.dense_mask(window=window) == expected[bounds[1] :, bounds[1] :]).all()
    assert (pickle.loads(pickle.dumps(packed)).dense_mask(window=window) == expected).all()
    assert (Layout.pack([packed, parts[0]]).dense_mask(window=window)[: len(packed), : len(packed)] == expected).all()
    assert "in 6 documents" in repr(packed) and "; or " in repr(packed)


def test_plan_parts() -> None:
    layout = layouts.gistpool(10, 4, 3)
    plan = layout.compile()
    assert plan.slices == {
        Role.BOS: slice(0, 1), Role.CONTEXT: slice(1, 11), Role.MEMORY: slice(11, 14), Role.TEXT: slice(14, 17)
    }  # fmt: skip
    for role, rows in plan.slices.items():
        assert (layout.roles[plan.order[0, rows]] == role).all()
    assert (plan.order[0][plan.inverse[0]] == torch.arange(17)).all()
    values = torch.randn(2, 17, 3)
    assert (plan.restore(plan.arrange(values)) == values).all()
    assert (plan.arrange(values) == values[:, plan.order[0]]).all()
    some = layout.compile(queries=slice(5, None))
    assert some.slices[Role.MEMORY] == slice(6, 9)
    assert Role.BOS not in some.slices
    with pytest.raises(ValueError, match="inverse: expected a plan of all 17 rows, got one of 12"):
        _ = some.inverse
    assert layout.compile(grouped=False).slices is None
    moved = plan.to("meta")
    assert moved.spans.device.type == moved.order.device.type == moved.positions.device.type == "meta"
    assert moved.slices == plan.slices


def test_rows_step_by_step_equal_the_whole() -> None:
    plan = layouts.decoder(6, 4, 2, task="lm", text=5).compile(window=7)
    whole = mask_of(plan.spans[0], plan.num_keys)
    for row in range(4, plan.num_queries):
        step = plan.rows(row, row + 1, num_keys=row + 1)
        assert step.num_keys == row + 1
        assert (mask_of(step.spans[0], row + 1) == whole[row : row + 1, : row + 1]).all()
        assert step.positions.tolist() == plan.positions[row : row + 1].tolist()
    assert plan.rows(3, 6).num_keys == plan.num_keys
    assert plan.rows(3, 6).slices == {Role.MEMORY: slice(0, 1), Role.TASK: slice(1, 2), Role.TEXT: slice(2, 3)}
    with pytest.raises(ValueError, match=r"rows: expected rows that see only 4 keys, got one that sees key 5"):
        plan.rows(4, 6, num_keys=4)
    with pytest.raises(ValueError, match=r"rows: expected 0 <= start <= stop <= 10, got start 3, stop 11"):
        plan.rows(3, 11)


def test_layout_is_immutable_and_pickles() -> None:
    source = np.full(3, Role.TEXT, np.uint8)
    layout = Layout(roles=source, sees={Role.TEXT: {Role.TEXT: (recent(2), older(5))}}, name="a")
    source[0] = Role.PAD
    assert layout.roles[0] == Role.TEXT
    with pytest.raises(ValueError, match="read-only"):
        layout.roles[0] = 1
    with pytest.raises(TypeError):
        layout.sees[Role.TEXT] = {}
    again = pickle.loads(pickle.dumps(layout))
    assert again.sees == layout.sees
    assert (again.roles == layout.roles).all()
    with pytest.raises(ValueError, match="read-only"):
        again.roles[0] = 1


def test_extreme_document_and_segment_numbers() -> None:
    low, high = -(2**31), 2**31 - 1
    layout = Layout(roles=TEXT, sees={Role.TEXT: {Role.TEXT: windows(2)}}, segments=[low, high, high])
    assert layout.compile().spans[0].tolist() == [[[0, 1]], [[1, 3]], [[1, 3]]]
    assert layout.dense_mask().sum() == 5
    packed = Layout.pack([Layout(roles=TEXT, sees=SEES, documents=[low, 0, high])] * 2)
    assert packed.documents.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="expected documents to be nondecreasing"):
        Layout(roles=TEXT, sees=SEES, documents=[high, 0, low])


def test_plans_pass_through_torch_compile() -> None:
    def step(values: torch.Tensor, plan: Plan) -> torch.Tensor:
        inside = plan.arrange(values) * plan.positions[:, None]
        return plan.restore(inside)[:, : plan.num_keys - 1] + plan.spans[..., 1].amax()

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for layout, grouped in ((layouts.gistpool(10, 4, 3), True), (layouts.causal(5), False)):
        plan = layout.compile(grouped=grouped)
        values = torch.randn(2, len(layout), 3)
        assert (compiled(values, plan) == step(values, plan)).all()


def test_repr_reads() -> None:
    text = repr(layouts.gistpool(10, 4, 3))
    assert text == (
        "Layout 'GistPool 4x': 17 tokens\n"
        "  BOS           1  positions 0; sees BOS (all)\n"
        "  CONTEXT      10  positions 1..12, 3 segments; sees BOS (all), CONTEXT (causal)\n"
        "  MEMORY        3  positions 5..13, 3 segments; sees BOS (all), CONTEXT (windows(5)), MEMORY (self)\n"
        "  TEXT          3  positions 14..16; sees BOS (all), MEMORY (all), TEXT (causal)"
    )
    assert "in 2 documents" in repr(Layout.pack([layouts.causal(2)] * 2))


TEXT = [int(Role.TEXT)] * 3
SEES = {Role.TEXT: {Role.TEXT: CAUSAL}}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"roles": []}, ValueError, r"expected roles of shape \[N\] with N >= 1, got shape \(0,\)"),
        ({"roles": [[4]]}, ValueError, r"expected roles of shape \[N\]"),
        ({"roles": [4, 6]}, ValueError, r"expected roles to be values of Role, at most 5, got 6"),
        ({"roles": [4, -1]}, ValueError, r"expected roles to fit uint8, got -1 to 4"),
        ({"roles": [4.0]}, TypeError, r"expected roles to hold integers, got dtype float64"),
        ({"segments": [0]}, ValueError, r"expected segments of shape \[3\] as roles, got shape \(1,\)"),
        ({"segments": [0, 2, 1]}, ValueError, r"nondecreasing among the TEXT tokens .* got segment 1 at token 2"),
        ({"segments": [0, 0, 2**31]}, ValueError, r"expected segments to fit int32, got 0 to 2147483648"),
        ({"documents": [0, 1, 0]}, ValueError, r"expected documents to be nondecreasing"),
        ({"positions": [0, 1]}, ValueError, r"expected positions of shape \[3\] or \[A, 3\], got shape \(2,\)"),
        ({"positions": [0, -1, 2]}, ValueError, r"expected positions >= 0, got -1"),
        ({"positions": [0, float("nan"), 2]}, ValueError, r"expected finite positions, got NaN or infinity"),
        ({"positions": [True, False, True]}, TypeError, r"expected positions to hold integers or floats, got dtype b"),
        ({"positions": np.array([2**63] * 3, np.uint64)}, ValueError, r"expected positions to fit int64"),
        ({"ordinals": [0, 2, 2]}, ValueError, r"expected ordinals to ascend within each document"),
        ({"ordinals": [-1, 2, 3]}, ValueError, r"expected ordinals in \[0, 2\*\*62\), got -1 to 3"),
        ({"sees": None}, TypeError, r"expected sees to be \{Role: \{Role: relation\}\}, got NoneType"),
        ({"sees": {Role.TEXT: CAUSAL}}, TypeError, r"expected sees\[.*\] to be \{Role: relation\}, got Relation"),
        ({"sees": {Role.TEXT: {Role.TEXT: "causal"}}}, TypeError, r"sees\[TEXT\]\[TEXT\] to be a relation .* 'causal'"),
        ({"sees": {Role.TEXT: {Role.TEXT: ()}}}, TypeError, r"to be a relation or a tuple of them, got \(\)"),
        ({"sees": {Role.TEXT: {Role.PAD: ALL}}}, ValueError, r"roles other than PAD, got <Role.PAD: 5>"),
        ({"sees": {4: {}}}, ValueError, r"expected the keys of sees to be roles other than PAD, got 4"),
    ],
)
def test_bad_layouts_are_named(fields: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Layout(**{"roles": TEXT, "sees": SEES, **fields})


def test_bad_calls_are_named() -> None:
    layout = layouts.causal(3)
    with pytest.raises(ValueError, match=r"compile: expected window >= 1, got 0"):
        layout.compile(window=0)
    with pytest.raises(ValueError, match=r"compile: expected queries within \[0, 3\), got 1 to 3"):
        layout.compile(queries=[1, 3])
    with pytest.raises(TypeError, match=r"compile: expected queries to be a slice, bool \[3\] or 1D indices"):
        layout.compile(queries=[0.5])
    with pytest.raises(ValueError, match=r"take: expected index of shape \[3\] where bool, got shape \(2,\)"):
        layout.take([True, False])
    with pytest.raises(ValueError, match=r"Layout: expected roles of shape \[N\] with N >= 1, got shape \(0,\)"):
        layout.take(slice(0, 0))
    with pytest.raises(ValueError, match=r"dense_mask: expected order to be 'logical' or 'physical', got 'any'"):
        layout.dense_mask("any")
    image = Layout(roles=TEXT, sees=SEES, positions=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"Layout.pack: expected positions with the same number of axes"):
        Layout.pack([layout, image])
    with pytest.raises(ValueError, match=r"Layout: expected one sees table for each of 1 documents, got 2"):
        Layout(roles=TEXT, sees=[SEES, SEES])
    with pytest.raises(TypeError, match=r"Layout: expected sees to be .*, got int"):
        Layout(roles=TEXT, sees=[3])
    with pytest.raises(ValueError, match=r"Layout.pack: expected at least one layout, got none"):
        Layout.pack([])
    with pytest.raises(ValueError, match=r"compile_batch: expected at least one layout, got none"):
        compile_batch([])
    with pytest.raises(ValueError, match=r"compile_batch: expected positions with the same number of axes"):
        compile_batch([layout, Layout(roles=TEXT, sees=SEES, positions=np.zeros((2, 3)))])
    with pytest.raises(ValueError, match=r"windows: expected count >= 1, got 0"):
        windows(0)
    with pytest.raises(TypeError, match=r"recent: expected tokens to be an int, got float"):
        recent(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Relation: expected kind to be one of all, causal"):
        Relation("sometimes")
    with pytest.raises(ValueError, match=r"Relation: expected no size for kind 'all', got 3"):
        Relation("all", 3)


def test_a_plan_is_three_lines() -> None:
    plan = layouts.gistpool(context=400, ratio=8, text=9).compile(windows=(16,))
    assert str(plan).splitlines() == [
        "Plan: 460 queries, 460 keys, up to 3 spans a query, for any batch, windows of 16",
        "  rows       BOS 0:1, CONTEXT 1:401, MEMORY 401:451, TEXT 451:460, in physical order",
        "  positions  0..459, int64, on cpu",
    ]
    spans = torch.zeros(2, 4, 1, 2, dtype=torch.int32)
    assert repr(layouts.Plan.from_spans(spans, 4)).endswith("rows       logical order\n  positions  none, on cpu")
