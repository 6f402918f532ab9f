"""Pictures of nuggets against what they are drawn from, and the count of token types by hand."""

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit.viz.style import Picture
from gistkit_lab.evaluate.token_types import token_types
from gistkit_lab.viz.nuggets import draw_attention_to_nuggets, draw_token_types


def test_token_types_by_hand():
    tokens = ["a", ",", "b", ",", "\n", "a", ".", ",", "c", "."]
    selected = [False, True, False, True, True, False, True, False, False, False]
    # Two of four are commas; the point is twice in the text, the line break once.
    assert token_types(tokens, selected) == [
        (",", 0.5, 0.3), (".", 0.25, 0.2), ("\n", 0.25, 0.1), ("a", 0.0, 0.2), ("b", 0.0, 0.1), ("c", 0.0, 0.1),
    ]  # fmt: skip
    assert token_types(["x"], np.array([True])) == [("x", 1.0, 1.0)]


def test_token_types_refuse():
    with pytest.raises(TypeError, match="token_types: expected tokens to be a sequence of strings"):
        token_types("ab", [True, False])
    with pytest.raises(TypeError, match="token_types: expected selected of dtype bool, got float64"):
        token_types(["a"], [1.0])
    with pytest.raises(ValueError, match="token_types: expected selected to have at least one nugget, got none"):
        token_types(["a", "b"], [False] * 2)


def test_token_types_are_drawn_side_by_side(tmp_path):
    types = [(" the", 0.4, 0.1), ("\n", 0.3, 0.05), ("$x_$", 0.2, 0.05), ("a", 0.1, 0.8)]
    figure = draw_token_types(types, top=3)
    among, everywhere = figure.axes[0].containers
    assert [bar.get_width() for bar in among] == [0.4, 0.3, 0.2]
    assert [bar.get_width() for bar in everywhere] == [0.1, 0.05, 0.05]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["␣the", "↵", "$x_$"]
    # The first stands at the top, its two bars beside each other.
    low, high = figure.axes[0].get_ylim()
    assert low > high and all(bar.get_y() < other.get_y() for bar, other in zip(among, everywhere, strict=True))
    figure.savefig(tmp_path / "types.png")
    assert figure.axes[0].get_title(loc="left") == "The first 3 token types: 90% of the nuggets"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["of nuggets", "of all tokens"]
    assert len(draw_token_types(types).axes[0].containers[0]) == 4
    with pytest.raises(ValueError, match="draw_token_types: expected at least one token type, got none"):
        draw_token_types([])
    with pytest.raises(ValueError, match="draw_token_types: expected top >= 1, got 0"):
        draw_token_types(types, top=0)


def test_attention_is_drawn_with_the_nuggets_columns_marked():
    rng = np.random.default_rng(0)
    weights = rng.random((5, 30)) * (rng.random((5, 30)) < 0.6)
    weights[2, 3] = 50
    chosen = np.arange(30) % 7 == 3
    figure = draw_attention_to_nuggets(weights, chosen, keys=range(100, 130), queries=["a", " b", "\n", "$d", "e"])
    axes = figure.axes[0]
    (image,) = axes.images
    assert (image.get_array().filled(0) == weights).all()
    # One outlier does not pale the rest.
    assert image.get_clim()[1] < 1
    (marks,) = axes.lines
    assert marks.get_xdata().tolist() == np.flatnonzero(chosen).tolist()
    assert [(patch.get_x(), patch.get_width()) for patch in axes.patches] == [(at - 0.5, 1) for at in (3, 10, 17, 24)]
    assert all(patch.get_zorder() < image.get_zorder() for patch in axes.patches)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "␣b", "↵", "$d", "e"]
    keys = dict(zip(axes.get_xticks().tolist(), [label.get_text() for label in axes.get_xticklabels()], strict=True))
    assert len(keys) > 3 and all(int(name) == place + 100 for place, name in keys.items())
    assert axes.get_xlabel() == "key (▼ nugget)"


def test_attention_without_nuggets_or_weights_can_be_drawn(tmp_path):
    figure = draw_attention_to_nuggets([[0.0, 0.0]], [False, False])
    figure.savefig(tmp_path / "none.png")
    assert not figure.axes[0].lines and figure.axes[0].get_xlabel() == "key"
    wide = draw_attention_to_nuggets(np.ones((2, 400)), [True] * 400, keys=[f"key {i}" for i in range(400)])
    assert len(wide.axes[0].get_xticks()) < 20


def test_attention_refuses():
    with pytest.raises(ValueError, match=r"expected weights \[queries, keys\], got \[3\]"):
        draw_attention_to_nuggets([1.0, 2.0, 3.0], [True] * 3)
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(ValueError, match="expected finite weights >= 0"):
            draw_attention_to_nuggets([[1.0, bad]], [True] * 2)
    with pytest.raises(ValueError, match=r"expected selected of shape \[2\]"):
        draw_attention_to_nuggets([[1.0, 2.0]], [True])
    with pytest.raises(ValueError, match="expected 1 queries, as weights has, got 2"):
        draw_attention_to_nuggets([[1.0, 2.0]], [True] * 2, queries=["a", "b"])


def test_pictures_go_into_given_axes():
    axes = Picture().add_subplot()
    assert draw_token_types([(" the", 0.4, 0.1), (",", 0.3, 0.2)], ax=axes) is axes and len(axes.patches) == 4
    axes = Picture().add_subplot()
    assert draw_attention_to_nuggets([[0.5, 0.25], [0.0, 1.0]], [True, False], ax=axes) is axes and axes.images
