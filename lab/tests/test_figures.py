"""Pictures of the studies against the numbers that they are drawn from."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from gistkit_lab.viz import draw_bleu_by_length, draw_grid_similarity, draw_perplexity
from gistkit_lab.viz.dodo import STYLE


def test_bleu_is_a_line_a_method_with_bars_over_seeds():
    series = {"ICAE": {300: [90.0, 96.0], 100: [99.0, 99.5]}, "Dodo learned": {100: [97.0], 300: [98.0]}}
    axes = draw_bleu_by_length(series).axes[0]
    icae, dodo = (line.lines[0] for line in axes.containers)
    assert icae.get_xydata().tolist() == [[100, 99.25], [300, 93]]
    assert dodo.get_xydata().tolist() == [[100, 97], [300, 98]]
    bars = axes.containers[0].lines[2][0].get_segments()
    assert [bar.tolist() for bar in bars] == [[[100, 99], [100, 99.5]], [[300, 90], [300, 96]]]
    assert dodo.get_color() == STYLE["Dodo learned"]["color"] != icae.get_color()
    low, high = axes.get_ylim()
    assert 70 < low < 90 and 100 < high < 103
    low, high = draw_bleu_by_length({"a": {1: [0.0]}}).axes[0].get_ylim()
    assert -5 < low < 0 and 100 < high < 103


def test_perplexity_is_a_line_an_arm_with_bars_over_seeds():
    series = {
        "Dodo learned": [(130.5, [6.5, 6.75, 7.75]), (64.0, [7.0, 7.5])],
        "Full (sliding)": [(64, [7.95]), (128, [6.87]), (256, [6.39])],
    }
    figure = draw_perplexity(series, title="a title")
    axes = figure.axes[0]
    dodo, full = axes.containers
    assert dodo.lines[0].get_xydata().tolist() == [[64, 7.25], [130.5, 7]]
    assert [segment.tolist() for segment in dodo.lines[2][0].get_segments()] == [
        [[64, 7], [64, 7.5]], [[130.5, 6.5], [130.5, 7.75]],
    ]  # fmt: skip
    assert full.lines[0].get_xydata().tolist() == [[64, 7.95], [128, 6.87], [256, 6.39]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "128", "256"]
    # The legend has the order of the table of styles.
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["Full (sliding)", "Dodo learned"]
    one = draw_perplexity({"Dodo learned": [(100.0, [7.0])]}).axes[0]
    assert [label.get_text() for label in one.get_xticklabels()] == ["100"]


def test_arms_differ_in_shape_and_in_colour_or_line():
    assert list(STYLE) == [
        "Full (sliding)", "Full (truncated)", "No nuggets", "Compressive", "Dodo learned", "Dodo strided",
        "Dodo random", "Dodo delimiters", "Dodo frozen scorer",
    ]  # fmt: skip
    assert len({style["marker"] for style in STYLE.values()}) == 9
    assert len({(to_rgba(style["color"]), style["linestyle"]) for style in STYLE.values()}) == 9
    names = ["a", "b", "Dodo random", "c", "d", "e", "f", "g", "h"]
    lines = [line.lines[0] for line in draw_bleu_by_length({name: {1: [50.0]} for name in names}).axes[0].containers]
    assert len({line.get_marker() for line in lines}) == 9
    assert lines[2].get_marker() == STYLE["Dodo random"]["marker"]


def test_series_that_cannot_be_drawn_are_refused():
    for function in (draw_bleu_by_length, draw_perplexity):
        name = function.__name__
        with pytest.raises(ValueError, match=f"{name}: expected 1 to 9 series, got 0"):
            function({})
        with pytest.raises(ValueError, match=f"{name}: expected 1 to 9 series, got 10"):
            function({str(i): {} for i in range(10)})
    for lengths in ({}, {100: []}, {100: [np.nan]}):
        with pytest.raises(ValueError, match=r"draw_bleu_by_length: expected points of finite values, .* of 'ICAE'"):
            draw_bleu_by_length({"ICAE": lengths})
    for points in ([], [(64, [])], [(64, [np.inf])]):
        with pytest.raises(ValueError, match=r"draw_perplexity: expected points of finite values, .* of 'No nuggets'"):
            draw_perplexity({"No nuggets": points})
    with pytest.raises(ValueError, match="draw_perplexity: expected states above 0, got 0 of 'No nuggets'"):
        draw_perplexity({"No nuggets": [(0, [7.0])]})


def test_a_map_for_each_position_of_a_grid():
    grid = np.random.default_rng(0).normal(size=(5, 10, 3))
    figure = draw_grid_similarity({"trained": grid})
    assert [axes.get_title() for axes in figure.axes] == ["(1, 2)", "(1, 7)", "(2, 5)", "(3, 2)", "(3, 7)"]
    figure = draw_grid_similarity({"trained": grid, "shown": grid * 2}, [(4, 9)])
    first, second = figure.axes
    products = grid @ grid[4, 9]
    scaled = (products - products.min()) / np.ptp(products)
    np.testing.assert_allclose([axes.get_images()[0].get_array() for axes in (first, second)], [scaled] * 2)
    assert first.get_ylabel() == "trained"
    with pytest.raises(ValueError, match=r"embeddings: expected \[height, width, D\] for 'a'"):
        draw_grid_similarity({"a": np.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"points: expected positions within 5 x 10, got \(5, 0\)"):
        draw_grid_similarity({"a": np.zeros((5, 10, 3))}, [(5, 0)])
