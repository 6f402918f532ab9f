"""What `gistkit.viz` promises of all its pictures: figures, and never pyplot."""

import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from tests.helpers.programs import printed


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
