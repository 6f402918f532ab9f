"""What `gistkit.viz` promises of all its pictures: figures, or the axes that were given, and never pyplot."""

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit import layouts, viz
from gistkit.viz.style import Picture
from tests.helpers.programs import printed

ONE_PANEL = {
    "draw_layout": (layouts.gist(6, 3, 2),),
}


def drawn(axes):
    """Everything that the axes show, as numbers."""
    shown = [image.get_array() for image in axes.images]
    shown += [line.get_xydata() for line in axes.lines]
    shown += [[patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()] for patch in axes.patches]
    return [np.ma.filled(np.ma.asarray(each, dtype=float), -1).tolist() for each in shown]


def test_a_picture_of_one_panel_goes_into_given_axes():
    figure = Picture(figsize=(28, 4), layout="constrained")
    *own, other = figure.subplots(1, len(ONE_PANEL) + 1)
    for axes, (name, arguments) in zip(own, ONE_PANEL.items(), strict=True):
        options = {
            "draw_layout": {"order": "logical", "positions": False},
        }.get(name, {})  # fmt: skip
        alone = getattr(viz, name)(*arguments, **options)
        assert isinstance(alone, Picture), name
        assert getattr(viz, name)(*arguments, **options, ax=axes) is axes
        assert axes.figure is figure and drawn(axes) == drawn(alone.axes[0]) != [], name
        assert not figure.legends and not any(later.has_data() for later in [*own[own.index(axes) + 1 :], other]), name
    figure.savefig("figure.png")


@pytest.mark.slow
def test_pictures_load_neither_pyplot_nor_transformers():
    code = """
import sys, gistkit as gk
from gistkit import viz
missing = [name for name in viz.__all__ if not callable(getattr(viz, name))]
viz.draw_gallery({"one": gk.layouts.causal(3)})._repr_png_()
print(*missing, *{"matplotlib.pyplot", "transformers", "IPython"} & set(sys.modules))
"""
    assert printed(code) == "\n"
