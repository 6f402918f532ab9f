"""compile_batch(aligned=True): every role at the same rows in all of a ragged batch, seeing what its layout says."""

import itertools

import numpy as np
import pytest

from gistkit import layouts
from gistkit.layouts.dodo import with_nuggets_again


def ragged(**options):
    sizes = ((7, 2, 5), (12, 0, 1), (3, 4, None), (1, 1, 2))
    return [layouts.gistpool(n, min(n, 3), text, windows=windows, **options) for n, text, windows in sizes]


@pytest.mark.parametrize("sees", [{}, {"context_sees_memory": True, "memory_sees_memory": True}])
def test_rows_see_what_their_layouts_say(sees):
    batch = ragged(**sees)
    plan = layouts.compile_batch(batch, aligned=True, windows=(3, 5))
    rows = plan.num_keys
    for b, layout in enumerate(batch):
        order = plan.order[b].numpy()
        assert sorted(order) == list(range(rows))
        for window, cut in [(None, plan), *plan.windowed.items()]:
            mask = np.zeros((rows, rows), bool)
            mask[: len(layout), : len(layout)] = layout.dense_mask(window=window)
            got = np.zeros((rows, rows), bool)
            for row, spans in enumerate(cut.spans[b].numpy()):
                filled = [(start, end) for start, end in spans if start < end]
                assert all(end < start for (_, end), (start, _) in itertools.pairwise(filled))
                for start, end in filled:
                    got[row, start:end] = True
            np.testing.assert_array_equal(got, mask[order][:, order])


def test_roles_have_the_same_rows_in_all_of_the_batch():
    batch = ragged()
    plan = layouts.compile_batch(batch, aligned=True)
    widths = {role: its.stop - its.start for role, its in plan.slices.items()}
    assert widths == {
        role: max(int((layout.roles == role).sum()) for layout in batch) for role in layouts.Role if role in widths
    }
    for b, layout in enumerate(batch):
        order = plan.order[b].numpy()
        for role, rows in plan.slices.items():
            mine = order[rows][order[rows] < len(layout)]
            np.testing.assert_array_equal(mine, np.flatnonzero(layout.roles == role))
            np.testing.assert_array_equal(plan.positions[b, rows].numpy()[: len(mine)], layout.positions[mine])


def test_rows_of_one_length_are_those_of_compile():
    layout = layouts.gistpool(9, 4, 3)
    plan, one = layouts.compile_batch([layout, layout], aligned=True), layout.compile()
    assert (plan.spans == one.spans).all() and (plan.order == one.order).all() and plan.slices == one.slices


@pytest.mark.parametrize(("tau", "segment"), [(6, 3), (4, 1), (5, 5), (64, 32), (1, 1)])
def test_older_nuggets_are_read_at_their_second_place_and_recent_ones_at_their_first(tau, segment):
    rng = np.random.default_rng(0)
    batch = [
        layouts.dodo(rng.random(n) < share, tau, segment=segment, bos=True)
        for n, share in ((31, 0.4), (1, 0), (12, 1), (20, 0.1), (7, 0))
    ]
    plan = layouts.compile_batch(batch, aligned=True, windows=(3, 8))
    again, rows, nuggets = with_nuggets_again(plan, tau, segment), plan.num_keys, plan.slices[layouts.Role.MEMORY]
    assert (again.num_keys, nuggets.stop) == (rows + nuggets.stop - nuggets.start, rows)
    for b, layout in enumerate(batch):
        order = plan.order[b].numpy()
        first = np.maximum(0, order // segment * segment - (tau - segment))
        for window, cut in [(None, again), *again.windowed.items()]:
            layouts.Plan.from_spans(cut.spans, cut.num_keys)  # ascending, disjoint, within the keys
            mask = np.zeros((rows, rows), bool)
            mask[: len(layout), : len(layout)] = layout.dense_mask(window=window)
            seen = mask[order][:, order]
            old = seen[:, nuggets] & (order[None, nuggets] < first[:, None])
            seen[:, nuggets] &= ~old
            got = np.zeros((rows, again.num_keys), bool)
            for row, spans in enumerate(cut.spans[b].numpy()):
                for start, end in spans:
                    got[row, start:end] = True
            np.testing.assert_array_equal(got, np.concatenate([seen, old], 1))


def test_without_nuggets_there_is_no_second_place():
    plan = layouts.compile_batch([layouts.dodo(np.zeros(9, bool), 4, bos=True)], aligned=True)
    again = with_nuggets_again(plan, 4, 1)
    assert again.num_keys == 9 and (again.spans == plan.spans).all()


def test_refuses_what_it_cannot_align():
    with pytest.raises(ValueError, match=r"aligned: expected grouped=True and queries=None"):
        layouts.compile_batch(ragged(), aligned=True, grouped=False)
    packed = layouts.Layout.pack([layouts.gist(4, 2), layouts.gist(4, 2)])
    with pytest.raises(ValueError, match="aligned: expected layouts of one document"):
        layouts.compile_batch([packed], aligned=True)
