"""Layers with a sliding window: plans for their widths, layouts beyond the window, caches that forget."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import gistkit
from gistkit.hf import CACHE, attach, sliding_windows
from gistkit.layouts import compile_batch
from tests.helpers.models import OTHERS, double_angles, masked_logits, tiny
from tests.helpers.tiers import tiers
from tests.hf.test_families import TOLERANCE, tokens

SLIDING = {"mistral": 6, "qwen2": 5, "gemma2": 5, "gemma3": 4} | dict.fromkeys(OTHERS, 6)
# A window in all layers, in some, and beside another RoPE.
SOME = pytest.mark.parametrize("family", tiers(SLIDING, ["mistral", "gemma3"]))
GISTPOOL = gistkit.layouts.gistpool(12, 3, 6, windows=2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", *SLIDING])
def test_windows_of_a_model(family):
    assert sliding_windows(tiny(family)) == ((SLIDING[family],) if family in SLIDING else ())


def test_a_plan_of_every_width():
    plan = GISTPOOL.compile(windows=(7, 4, 4))
    assert list(plan.windowed) == [4, 7]
    for width, cut in plan.windowed.items():
        alone = GISTPOOL.compile(window=width)
        used = alone.spans.shape[2]
        assert torch.equal(cut.spans[:, :, :used], alone.spans) and cut.spans.shape == alone.spans.shape
        assert cut.positions is plan.positions and cut.order is plan.order and not cut.windowed
    both = GISTPOOL.compile(window=5, windows=(4, 7))
    assert torch.equal(both.windowed[7].spans, both.spans)
    assert torch.equal(both.windowed[4].spans, plan.windowed[4].spans)


def test_rows_of_a_plan_have_their_windows():
    plan = GISTPOOL.compile(windows=(4,)).to("cpu")
    some = plan.rows(3, 8)
    assert torch.equal(some.windowed[4].spans, plan.windowed[4].spans[:, 3:8])
    assert some.windowed[4].spans.is_contiguous() and some.windowed[4].num_keys == some.num_keys
    assert some.reach == plan.reach == len(GISTPOOL)


def test_a_ragged_batch_has_windows_in_every_row():
    layouts = [GISTPOOL, gistkit.layouts.gistpool(5, 3, 2, windows=1)]
    plan = compile_batch(layouts, windows=(4,))
    assert torch.equal(plan.windowed[4].spans, compile_batch(layouts, window=4).spans)
    assert plan.windowed[4].lengths is plan.lengths and plan.reach == len(GISTPOOL)


def test_reach_counts_places_in_logical_order():
    layout = gistkit.layouts.causal(10)
    assert layout.take([0, 9]).compile().reach == 10
    assert gistkit.layouts.Layout.pack([layout, gistkit.layouts.causal(3)]).compile().reach == 10


@pytest.mark.parametrize(("windows", "error"), [(4, TypeError), ("4", TypeError), ((0,), ValueError)])
def test_widths_are_checked(windows, error):
    with pytest.raises(error, match="compile: expected windows"):
        GISTPOOL.compile(windows=windows)


@SOME
def test_a_layout_beyond_the_window(family):
    model = tiny(family)
    ids = tokens(2, len(GISTPOOL))
    plan = GISTPOOL.compile(windows=sliding_windows(model))
    masks = [torch.from_numpy(GISTPOOL.dense_mask("physical", window)) for window in (None, SLIDING[family])]
    assert (masks[0] != masks[1]).any()
    expected = masked_logits(model, ids, masks[0], plan.positions[None].expand(2, -1), masks[1])
    with double_angles(model), attach(model):
        torch.testing.assert_close(model(ids, plan=plan, use_cache=False).logits, expected, **TOLERANCE)


@SOME
def test_a_plan_without_the_window_is_refused_where_it_would_cut(family):
    model = tiny(family)
    width = SLIDING[family]
    message = rf"plan: expected one compiled for a sliding window of {width} with windows=\({width},\).*got one for"
    far = gistkit.layouts.causal(width + 1).take([0, width])
    with attach(model):
        for layout in (gistkit.layouts.causal(width + 1), far):
            with pytest.raises(ValueError, match=message):
                model(tokens(1, len(layout)), plan=layout.compile(windows=(width + 1,)))
        short = gistkit.layouts.causal(width)
        expected = model(tokens(1, width)).logits
        torch.testing.assert_close(model(tokens(1, width), plan=short.compile()).logits, expected, **TOLERANCE)


@SOME
def test_decoding_step_by_step_beyond_the_window(family):
    model = tiny(family)
    ids = tokens(2, 10)
    plan = gistkit.layouts.causal(10).compile(windows=sliding_windows(model))
    parts = ((0, 6), (6, 7), (7, 10))
    with attach(model):
        whole = model(ids, plan=plan, use_cache=False).logits
        cache = DynamicCache()
        steps = [model(ids[:, a:b], plan=plan.rows(a, b, num_keys=b), **{CACHE: cache}).logits for a, b in parts]
        torch.testing.assert_close(torch.cat(steps, 1), whole, **TOLERANCE)
        # The model's own cache forgets keys beyond the window; without a plan that is what causal attention needs.
        cache = DynamicCache(config=model.config)
        steps = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in parts]
        torch.testing.assert_close(torch.cat(steps, 1), whole, **TOLERANCE)


@SOME
def test_a_cache_that_has_forgotten_keys_of_the_plan_is_refused(family):
    model = tiny(family)
    plan = gistkit.layouts.causal(10).compile(windows=sliding_windows(model))
    cache = DynamicCache(config=model.config)
    with attach(model):
        model(tokens(1, 9), plan=plan.rows(0, 9, num_keys=9), **{CACHE: cache})
        message = rf"{CACHE}: expected a cache that keeps the 10 keys.*DynamicCache\(\) made without a config"
        with pytest.raises(ValueError, match=message):
            model(tokens(1, 1), plan=plan.rows(9, 10), **{CACHE: cache})


def test_ragged_batches_beyond_the_window():
    model = tiny("gemma3")
    layouts = [GISTPOOL, gistkit.layouts.gistpool(5, 3, 2, windows=1)]
    plan = compile_batch(layouts, windows=sliding_windows(model))
    ids = tokens(2, len(GISTPOOL))
    with attach(model):
        together = model(ids, plan=plan, use_cache=False).logits
        for row, layout in enumerate(layouts):
            alone = layout.compile(windows=sliding_windows(model))
            expected = model(ids[row : row + 1, : len(layout)], plan=alone, use_cache=False).logits[0]
            torch.testing.assert_close(together[row, : len(layout)], expected, **TOLERANCE)


def test_spans_of_ones_own_count_keys():
    plan = gistkit.layouts.Plan.from_spans(torch.tensor([[[0, i + 1]] for i in range(6)], dtype=torch.int32), 6)
    assert plan.reach is None and not plan.windowed
    with attach(tiny("gemma3")) as model:
        with pytest.raises(ValueError, match="plan: expected one compiled for a sliding window of 4"):
            model(tokens(1, 6), plan=plan)
        cut = plan.with_windows(
            {4: torch.tensor([[[max(0, i - 3), i + 1] for i in range(6)]], dtype=torch.int32)[:, :, None]}
        )
        torch.testing.assert_close(model(tokens(1, 6), plan=cut).logits, model(tokens(1, 6)).logits, **TOLERANCE)


def test_replaced_plans_keep_their_windows():
    plan = GISTPOOL.compile(windows=(4,))
    moved = dataclasses.replace(plan, positions=plan.positions + 5)
    assert moved.windowed[4] is plan.windowed[4]
    assert np.array_equal(moved.order, plan.order)
