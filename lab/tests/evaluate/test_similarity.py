"""Pictures of position embeddings against the numbers they are drawn from."""

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit_lab.viz.similarity import draw_similarity, similarities

RANDOM = np.random.default_rng(0)


def test_similarities_by_loops():
    rows, others = RANDOM.normal(size=(5, 3)), RANDOM.normal(size=(4, 3))
    found = similarities(rows, others)
    for i in range(5):
        row = [sum(a * b for a, b in zip(rows[i], other, strict=True)) for other in others]
        np.testing.assert_allclose(found[i], [(x - min(row)) / (max(row) - min(row)) for x in row])
    assert np.isfinite(similarities(np.zeros((3, 2)))).all()


def test_a_map_for_each_encoder():
    before, after = RANDOM.normal(size=(7, 4)), RANDOM.normal(size=(7, 4))
    figure = draw_similarity({"before": before, "after": after}, trained=3)
    maps = [axes for axes in figure.axes if axes.get_images()]
    assert [axes.get_title() for axes in maps] == ["before", "after"]
    for axes, rows in zip(maps, (before, after), strict=True):
        np.testing.assert_allclose(axes.get_images()[0].get_array(), similarities(rows))
        assert axes.get_lines()[0].get_xdata()[0] == 2.5
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_errors():
    with pytest.raises(ValueError, match="embeddings: expected one array or more, by title, got none"):
        draw_similarity({})
    with pytest.raises(ValueError, match=r"embeddings: expected \[P, D\] for 'a', got shape \[3\]"):
        draw_similarity({"a": np.zeros(3)})
