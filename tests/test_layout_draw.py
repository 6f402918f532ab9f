"""The picture of a layout, and what happens without matplotlib."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gistkit import layouts
from gistkit.layouts import Layout, Role


def test_masks_are_drawn_in_the_keys_colours() -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    layout = layouts.gistpool(10, 4, 3)
    figure = layout.draw()
    logical, physical, positions = figure.axes
    for axes, order in ((logical, "logical"), (physical, "physical")):
        image = np.asarray(axes.images[0].get_array())
        mask = layout.dense_mask(order)
        assert ((image > 0) == mask).all()
        assert (image[mask] == np.broadcast_to(np.sort(layout.roles) + 1, mask.shape)[mask]).all() or order == "logical"
    drawn = np.concatenate([points.get_offsets() for points in positions.collections])
    assert sorted(map(tuple, drawn.tolist())) == list(enumerate(layout.positions.tolist()))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["BOS", "CONTEXT", "MEMORY", "TEXT"]


def test_layouts_of_every_kind_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    one = Layout(roles=[Role.TEXT, Role.PAD], sees={}, positions=[[0.5, 1.0], [2.0, 2.5]])
    for i, layout in enumerate((one, Layout.pack([layouts.causal(3)] * 2), layouts.causal(100))):
        layout.draw(window=2, title="a title").savefig(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 0


def test_masks_side_by_side_are_those_of_the_layouts() -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    from gistkit.viz.layout import draw_masks

    named = {"causal": layouts.causal(6), "Gist": layouts.gist(6, 3, 2), "GistPool": layouts.gistpool(7, 3, 2)}
    for order in ("logical", "physical"):
        figure = draw_masks(named, order=order, columns=2)
        assert [axes.get_title() for axes in figure.axes] == list(named)
        for axes, layout in zip(figure.axes, named.values(), strict=True):
            assert ((np.asarray(axes.images[0].get_array()) > 0) == layout.dense_mask(order)).all()
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["BOS", "CONTEXT", "MEMORY", "TEXT"]
    with pytest.raises(ValueError, match="draw_masks: expected at least one layout, got none"):
        draw_masks({})
    with pytest.raises(ValueError, match="draw_masks: expected columns >= 1, got 0"):
        draw_masks(named, columns=0)


def test_too_many_tokens() -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    with pytest.raises(ValueError, match=r"draw: expected a layout of at most 1024 tokens, got 1025"):
        layouts.causal(1025).draw()


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gistkit.viz")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install gistkit\[viz\]"):
        layouts.causal(3).draw()
