"""Pictures of attention maps against what they are drawn from, and the tracking figures of maps whose line is known."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import gistkit as gk
from gistkit import layouts
from gistkit.inspect import AttentionRecorder, measure_tracking
from gistkit.layouts import Role
from gistkit.viz.attention import draw_attention, draw_memory_attention, draw_memory_map
from gistkit.viz.layout import ROLE_COLOURS

LAYOUT = layouts.gistpool(20, 4, windows=1)


def recorded(**options):
    torch.manual_seed(0)
    plan = LAYOUT.compile()
    query, key, value = torch.randn(3, 2, 4, plan.num_keys, 8)
    with AttentionRecorder(**options) as recorder:
        gk.attention(query, key, value, plan)
    return recorder[0]


def windows(memory, ratio, beside=0.0):
    """[M, L]: all attention in each memory token's own window, and `beside` on every token."""
    return np.kron(np.eye(memory), np.ones(ratio)) + beside


def texts(axes):
    return [text.get_text() for text in [axes.title, axes._left_title, *axes.texts] if text.get_text()]


@pytest.mark.parametrize(("memory", "ratio"), [(4, 5), (7, 1), (16, 5), (3, 12)])
def test_tracking_of_windows_has_slope_r_and_focus_1(memory, ratio):
    found = measure_tracking(torch.from_numpy(windows(memory, ratio)))
    assert found.slope == pytest.approx(ratio) and found.peak_slope == pytest.approx(ratio)
    assert found.own_segment == pytest.approx(1) and found.r_squared == pytest.approx(1)


def test_a_flat_part_holds_back_the_centre_and_not_the_peak():
    # Half of each row's attention is flat.
    found = measure_tracking(torch.from_numpy(windows(8, 5, beside=5 / 40)))
    assert found.peak_slope == pytest.approx(5) and found.slope == pytest.approx(2.5)
    assert found.own_segment == pytest.approx(0.5 + 0.5 / 8)
    flat = measure_tracking(torch.ones(8, 40))
    assert flat.slope == pytest.approx(0, abs=1e-9) and flat.peak_slope == 0
    assert flat.own_segment == pytest.approx(1 / 8)


def test_one_far_peak_does_not_bend_the_line_and_memory_tokens_without_attention_are_left_out():
    weights = windows(9, 5)
    weights[8] = 0
    weights[8, 0] = 1
    assert measure_tracking(torch.from_numpy(weights)).peak_slope == pytest.approx(5)
    weights[8] = 0
    found = measure_tracking(torch.from_numpy(weights))
    assert (found.slope, found.own_segment) == (pytest.approx(5), pytest.approx(1))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(2, 2, 2), r"weights: expected \[M, L\], memory tokens and context, got shape \(2, 2, 2\)"),
        (torch.tensor([[1.0, -1.0], [1.0, 1.0]]), "weights: expected finite weights of at least 0"),
        (torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "weights: expected at least 2 memory tokens, got 1 with any"),
    ],
)
def test_what_is_no_map_of_memory_tokens_is_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        measure_tracking(weights)


def test_a_memory_map_says_measured_beside_expected():
    figure = draw_memory_map(windows(8, 5, beside=5 / 40), title="EPL")
    axes, bar = figure.axes
    assert texts(axes) == [
        "From one memory token to the next, attention moves on\n"
        "by 5.0 context tokens at its peak, 2.5 on average\n"
        "(even: 5.0); 56% stays in the token's part (flat: 12%)",
        "EPL",
    ]
    (line,) = axes.lines
    assert np.allclose(np.diff(line.get_xdata()), 5) and line.get_xdata()[0] == 2
    np.testing.assert_allclose(axes.images[0].get_array().sum(-1), 1)
    assert bar.get_ylabel() == "share of attention" and axes.get_xlabel() == "context token"


def test_memory_attention_has_a_panel_a_layer_and_layout():
    maps = {"dpl": [np.ones((4, 20)), windows(4, 5)], "epl": [windows(4, 5), np.eye(4, 20)]}
    figure = draw_memory_attention(maps, first_layer=3)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 4 and len(figure.axes) == 5
    found = [text for axes in panels for text in texts(axes)]
    assert [text for text in found if "\n" not in text] == ["DPL", "EPL"]
    stated = [text for text in found if "\n" in text]
    assert [text.split("\n")[1].split(" at its peak")[0] for text in stated] == [
        f"by {slope} context tokens" for slope in ("0.0", "5.0", "5.0", "1.0")
    ]
    assert [text.split("\n")[2] for text in stated] == [
        f"(even: 5.0); {share} stays in the token's part (flat: 25%)" for share in ("25%", "100%", "100%", "25%")
    ]
    assert [axes.get_ylabel() for axes in panels] == ["layer 3\nmemory token", "", "layer 4\nmemory token", ""]
    with pytest.raises(ValueError, match="maps: expected at least one layout and a layer of each, got none"):
        draw_memory_attention({})
    with pytest.raises(ValueError, match=r"maps: expected weights \[M, L\] of one shape, got \(3, 20\), \(4, 20\)"):
        draw_memory_attention({"dpl": [windows(4, 5)], "epl": [windows(4, 5)[:3]]})
    for draw, weights in ((draw_memory_map, windows(4, 5)), (draw_memory_attention, maps)):
        with pytest.raises(ValueError, match="ratio: expected context tokens above 0, got 0"):
            draw(weights, ratio=0)


def test_captions_of_layouts_side_by_side_do_not_touch():
    # Slopes of four characters, as wide as they come.
    backwards = windows(16, 5)[::-1] + 1e-6
    figure = draw_memory_attention({"dpl": [backwards], "upl": [backwards], "epl": [windows(16, 5)]})
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.images]
    assert panels[0].get_title(loc="left").split("\n")[1].startswith("by -5.0 context tokens")
    ends = [axes._left_title.get_window_extent() for axes in panels]
    for left, right in itertools.pairwise(ends):
        assert left.x1 < right.x0


def test_a_map_is_drawn_as_recorded():
    one = recorded(heads=[2, 3])
    figure = draw_attention(one, head=3)
    axes, bar = figure.axes
    drawn = axes.images[0].get_array()
    expected = one.weights[0, 1].double().numpy()
    np.testing.assert_array_equal(drawn.filled(0), expected)
    np.testing.assert_array_equal(np.ma.getmaskarray(drawn), expected == 0)
    assert texts(axes) == ["Layer 0, head 3"] and bar.get_ylabel() == "attention weight"


def test_axes_count_tokens():
    one = recorded(reduce="mean", rows=slice(5, None))
    axes, bar = draw_attention(one).axes
    assert texts(axes) == ["Layer 0, mean of 4 heads"] and axes.get_xlim() == (0, 26) and axes.get_ylim() == (21, 0)
    assert axes.yaxis.get_major_formatter()(3, 0) == "8" and bar.get_ylabel() == "attention weight"


def test_the_strip_has_the_roles_of_keys():
    roles = np.sort(LAYOUT.roles)
    one = recorded(rows=slice(4, None))
    figure = draw_attention(one, key_roles=roles)
    (strip,) = figure.axes[0].child_axes
    image = strip.images[0]
    colours = image.cmap(image.norm(image.get_array().ravel()))[:, :3]
    assert np.allclose(colours, [to_rgb(ROLE_COLOURS[Role(role)]) for role in roles])
    named = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert named == ["BOS", "CONTEXT", "MEMORY"]


def test_axes_of_ones_own_are_drawn_in():
    own = Figure()
    left, right = own.subplots(1, 2)
    assert draw_attention(recorded(), ax=left) is left
    assert draw_memory_map(windows(4, 5), ax=right) is right
    part = own.subfigures().subplots()
    assert draw_memory_map(windows(4, 5), ax=part) is part
    assert len(left.images) == len(right.images) == len(part.images) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 1}, "head: expected one of the recorded 0, 2, got 1"),
        ({"key_roles": [Role.CONTEXT]}, r"key_roles: expected 26 roles, one for each of the map's keys, got \(1,\)"),
        ({"key_roles": [9] * 26}, "key_roles: expected roles 0 to 5, got 9 to 9"),
    ],
)
def test_errors_name_the_argument_and_what_came(options, message):
    with pytest.raises(ValueError, match=message):
        draw_attention(recorded(heads=[0, 2]), **options)


def test_a_mean_has_no_head_and_an_empty_map_no_picture():
    with pytest.raises(ValueError, match="head: expected None for a map that is a mean over heads, got 1"):
        draw_attention(recorded(reduce="mean"), head=1)
    with pytest.raises(ValueError, match=r"recorded: expected a map with queries and keys, got \[2, 4, 0, 26\]"):
        draw_attention(recorded(rows=slice(0)))


def test_a_line_of_memory_tokens_in_a_recorded_map():
    """GistPool's windows, seen through the recorder: the mask itself is the line."""
    one = recorded(reduce="mean", rows=slice(21, None))
    context = one.weights[0, 0, :, 1:21]
    assert measure_tracking(context).own_segment == pytest.approx(1)
    assert measure_tracking(context.flip(1)).own_segment < 0.3
