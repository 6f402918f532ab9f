"""The picture of a layout, the gallery of all methods, and what happens without matplotlib."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from gistkit import layouts
from gistkit.layouts import Layout, Role
from gistkit.layouts.builders import EXAMPLES
from gistkit.viz import draw_gallery, draw_layout
from gistkit.viz.gallery import all_methods
from gistkit.viz.layout import MARKERS, ROLE_COLOURS
from tests.helpers.programs import printed


@pytest.mark.parametrize("orders", [("logical", "physical"), ("logical",), ("physical",)])
def test_masks_are_drawn_in_the_keys_colours_over_their_positions(orders: tuple[str, ...]) -> None:
    layout = layouts.gistpool(10, 4, 3)
    tokens = {"logical": np.arange(len(layout)), "physical": layout.compile().order[0].numpy()}
    figure = draw_layout(layout, order=orders[0] if len(orders) == 1 else "both", title="$x")
    *masks, positions = figure.axes
    for axes, order in zip(masks, orders, strict=True):
        image, mask = np.asarray(axes.images[0].get_array()), layout.dense_mask(order)
        assert (image == np.where(mask, layout.roles[tokens[order]] + 1, 0)).all()
    drawn = np.concatenate([points.get_offsets() for points in positions.collections])
    assert sorted(map(tuple, drawn.tolist())) == list(enumerate(layout.positions[tokens[orders[0]]].tolist()))
    assert positions.get_xlabel() == f"token, in {orders[0]} order" and figure.get_suptitle() == "$x"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["BOS", "CONTEXT", "MEMORY", "TEXT"]


def test_layouts_of_every_kind_can_be_drawn(tmp_path: Path) -> None:
    one = Layout(roles=[Role.TEXT, Role.PAD], sees={}, positions=[[0.5, 1.0], [2.0, 2.5]])
    for i, layout in enumerate((one, Layout.pack([layouts.causal(3)] * 2), layouts.causal(100))):
        layout.draw(title="a title").savefig(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 0


def test_masks_side_by_side_are_those_of_the_layouts() -> None:
    named = {"causal": layouts.causal(6), "Gist": layouts.gist(6, 3, 2), "GistPool $": layouts.gistpool(7, 3, 2)}
    figure = draw_gallery(named, columns=2)
    assert [axes.get_title() for axes in figure.axes] == list(named)
    for axes, layout in zip(figure.axes, named.values(), strict=True):
        assert ((np.asarray(axes.images[0].get_array()) > 0) == layout.dense_mask("logical")).all()
        (below,) = axes.child_axes
        drawn = np.concatenate([points.get_offsets() for points in below.collections])
        assert sorted(map(tuple, drawn.tolist())) == list(enumerate(layout.positions.tolist()))
        assert below.get_xlim() == axes.get_xlim()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["BOS", "CONTEXT", "MEMORY", "TEXT"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="draw_gallery: expected at least one layout, got none"):
        draw_gallery({})
    with pytest.raises(ValueError, match="draw_gallery: expected columns >= 1, got 0"):
        draw_gallery(named, columns=0)
    with pytest.raises(ValueError, match="draw_gallery: expected a layout of at most 1024 tokens, got 1025"):
        draw_gallery({"long": layouts.causal(1025)})


def test_the_gallery_has_every_builder() -> None:
    public = {name: getattr(layouts, name) for name in layouts.__all__}
    assert {
        name: value for name, value in public.items() if getattr(value, "__annotations__", {}).get("return") == "Layout"
    } == layouts.BUILDERS
    named = all_methods()
    assert named.keys() == EXAMPLES.keys() | {"Dodo, fixed resolution"} and next(iter(named)) == "Causal"
    assert {name for name, _ in EXAMPLES.values()} == layouts.BUILDERS.keys()
    nuggets = named["Dodo, fixed resolution"]
    mask, memory = nuggets.dense_mask("logical"), nuggets.roles == Role.MEMORY
    text = nuggets.roles == Role.TEXT
    causal = np.tri(len(nuggets), dtype=bool)
    assert (mask[~text] == causal[~text]).all()
    assert (mask[text] == (causal & (memory | text | (nuggets.roles == Role.BOS)))[text]).all()


@pytest.mark.slow
def test_the_committed_gallery_is_what_is_drawn(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "docs/gallery.png"
    assert committed.stat().st_size < 200_000
    draw_gallery().savefig(tmp_path / "gallery.png", dpi=160)
    now, then = (imread(path)[..., :3] for path in (tmp_path / "gallery.png", committed))
    assert np.abs(np.subtract(now.shape, then.shape)).max() <= 20
    # Fonts and margins may differ a little between releases of matplotlib: means of 20 by 20 pixels are compared.
    high, wide = (min(now.shape[axis], then.shape[axis]) // 20 for axis in (0, 1))
    blocks = [part[: high * 20, : wide * 20].reshape(high, 20, wide, 20, 3).mean((1, 3)) for part in (now, then)]
    assert np.abs(blocks[0] - blocks[1]).mean() < 0.02


def test_roles_that_meet_differ_in_grey() -> None:
    # As a printer or an image library makes grey of colours: ITU-R BT.601, 0 to 1.
    grey = {role: float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) for role, colour in ROLE_COLOURS.items()}
    for layout in all_methods().values():
        shades = sorted(grey[Role(role)] for role in np.unique(layout.roles))
        assert all(after - before > 0.2 for before, after in pairwise([*shades, 1.15]))
    pad = sorted(grey[role] for role in Role if role != Role.TASK)
    assert all(after - before > 0.12 for before, after in pairwise(pad))
    assert len(set(MARKERS.values())) == len(ROLE_COLOURS) == len(Role)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="draw_layout: expected order to be one of"):
        draw_layout(layouts.causal(3), order="grouped")
    with pytest.raises(ValueError, match=r"draw_layout: expected a layout of at most 1024 tokens, got 1025"):
        layouts.causal(1025).draw()


@pytest.mark.slow
def test_pictures_load_neither_pyplot_nor_transformers() -> None:
    code = """
import sys, gistkit as gk
from gistkit import viz
missing = [name for name in viz.__all__ if not callable(getattr(viz, name))]
viz.draw_gallery({"one": gk.layouts.causal(3)})._repr_png_()
print(*missing, *{"matplotlib.pyplot", "transformers", "IPython"} & set(sys.modules))
"""
    assert printed(code) == "\n"


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gistkit.viz")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install gistkit\[viz\]"):
        layouts.causal(3).draw()
