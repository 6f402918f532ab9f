"""Colours and shapes that remain distinct in grey and for the colour-blind."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Picture(Figure):
    """A figure that notebooks display, without pyplot and its list of open figures."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


# The result of drawing one panel: its figure, or the axes that were passed in.
FigureOrAxes: TypeAlias = Figure | Any


def axes_of(ax: Axes | None, figsize: tuple[float, float]) -> tuple[FigureOrAxes, Axes]:
    """The result of drawing one panel, and its axes: `ax`, or those of a new figure of this size."""
    if ax is not None:
        return ax, ax
    figure = Picture(figsize=figsize, layout="constrained", dpi=120)
    return figure, figure.subplots()


# Okabe and Ito's palette, which colour-blind readers can distinguish, and a grey.
COLOURS = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "black": "#000000",
    "grey": "#999999",
}
# Lines of several settings, in their order.
OTHER_STYLES: tuple[dict[str, Any], ...] = (
    {"color": COLOURS["blue"], "linestyle": "-", "marker": "o"},
    {"color": COLOURS["red"], "linestyle": "--", "marker": "s"},
    {"color": COLOURS["orange"], "linestyle": ":", "marker": "D"},
    {"color": COLOURS["sky"], "linestyle": "-.", "marker": "^"},
    {"color": COLOURS["black"], "linestyle": "--", "marker": "v"},
    {"color": COLOURS["green"], "linestyle": ":", "marker": "P"},
    {"color": COLOURS["purple"], "linestyle": "-", "marker": "X"},
    {"color": COLOURS["grey"], "linestyle": "--", "marker": "*"},
)


def tidy(axes: Axes) -> None:
    """Leaves only the left and bottom axes, and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
