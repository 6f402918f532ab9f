"""A matrix of queries and keys as one HTML file that a browser shows without a network: zoom, pan, and hover."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.events import DocumentReady
from bokeh.layouts import column, gridplot, row
from bokeh.models import (
    ColorBar,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    FixedTicker,
    Grid,
    HoverTool,
    LinearColorMapper,
    RadioButtonGroup,
    Range1d,
    Select,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE
from numpy.typing import NDArray

from gistkit.layouts.relations import Role
from gistkit.viz.layout import ROLE_COLOURS

__all__ = ["MARKERS", "MatrixPage"]
FRAME, STRIP = 600, 14
MARKERS = {
    Role.BOS: "square",
    Role.CONTEXT: "circle",
    Role.MEMORY: "triangle",
    Role.TASK: "diamond",
    Role.TEXT: "inverted_triangle",
    Role.PAD: "plus",
}
PLAIN = "#666666"
LABEL = "return side.data.label[Math.round(value)]"
TEMPLATE = """\
{% block preamble %}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:; font-src data:;
 style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval' blob:">
<style>
  body { font: 15px/1.5 sans-serif; color: #222; background: white; }
  main { margin: 1em 1.5em; } h1 { font-size: 1.3em; margin: 0; } p { margin: .2em 0 .6em; }
  b { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 .9em; border: 1px solid #222; }
</style>
{% endblock %}
{% block contents %}
<main><h1>{{ title | e }}</h1><p>{{ notes | e }}{{ legend }}</p><p id="state" role="status">Drawing …</p>
{{ super() }}</main>
{% endblock %}
"""


@dataclass(frozen=True, kw_only=True)
class MatrixPage:
    """What a page shows.

    Args:
        title: heading.
        notes: a line below it.
        queries, keys: the tokens along each side, the same where queries are the keys. Columns: "place", int32 from 0
            on; "label", a token's text for the hover box; and where they are known "colour" and "marker" for its role,
            "position0" on for its position ids, "physical", int32, the place of each token of the physical order.
        cells: {name: uint8 [Nq, Nk]}, a matrix or several to choose from.
        palette: colours of the cells, from 0.
        shades, mean: a cell is 0 or shades * group + shade, with a shade from 1. Seen from afar several cells are one:
            the largest, or with `mean` the group of the one with the largest shade, with the mean of their shades.
        value: (name, JavaScript that returns the text of the uint8 `cell`).
        ticks: {cell: label} of the colour bar, if there is to be one.
    """

    title: str
    notes: str
    queries: ColumnDataSource
    keys: ColumnDataSource
    cells: Mapping[str, NDArray[np.uint8]]
    palette: Sequence[str]
    shades: int
    mean: bool
    value: tuple[str, str]
    ticks: Mapping[float, str] | None = None

    def html(self) -> str:
        """The file."""
        document = Document()
        plot = self._plot()
        copies = self._copies(plot)
        grids = self._grids(plot)
        self._add_hover(plot, copies[0]["source"])
        order = RadioButtonGroup(
            labels=["Logical order", "Physical order (grouped by role)"], active=0, visible=self._has_two_orders,
        )  # fmt: skip
        strips = [ColumnDataSource({"start": [], "end": [], "colour": []}) for _ in range(2)]
        names = list(self.cells)
        map_select = Select(options=names, value=names[0], visible=len(names) > 1)
        script = CustomJS(
            code=Path(__file__).with_name("matrix_page.js").read_text(encoding="utf-8"),
            args={
                "plot": plot, "grids": grids, "queries": self.queries, "keys": self.keys, "strips": strips,
                "map": map_select,
                "maps": [np.frombuffer(gzip.compress(cells.tobytes(), 6), np.uint8) for cells in self.cells.values()],
                "order": order, "copies": copies, "shades": self.shades, "mean": self.mean,
            },
        )  # fmt: skip
        document.add_root(column(row(map_select, order), self._with_strips(plot, strips)))
        document.js_on_event(DocumentReady, script)
        words = {"notes": self.notes, "legend": self._legend()}
        return file_html(document, INLINE, self.title, template=TEMPLATE, template_variables=words)

    @property
    def _shape(self) -> tuple[int, int]:
        rows, width = next(iter(self.cells.values())).shape
        return rows, width

    @property
    def _has_two_orders(self) -> bool:
        sides = [side.data for side in (self.queries, self.keys)]
        return all("physical" in side for side in sides) and any((s["physical"] != s["place"]).any() for s in sides)

    def _plot(self) -> figure:
        rows, width = self._shape
        x_range = Range1d(-0.5, width - 0.5, bounds=(-0.5, width - 0.5), min_interval=min(4, width))
        y_range = Range1d(rows - 0.5, -0.5, bounds=(-0.5, rows - 0.5), min_interval=min(4, rows))
        plot = figure(
            x_range=x_range, y_range=y_range, frame_width=FRAME, frame_height=FRAME, min_border=0,
            tools="pan,box_zoom,wheel_zoom,reset,save", name="matrix",
        )  # fmt: skip
        plot.grid.visible = plot.axis.visible = False
        return plot

    def _copies(self, plot: figure) -> list[dict[str, Any]]:
        """Images of the cells, each half as fine as the one before, which the page's script fills and shows."""
        rows, width = self._shape
        mapper = LinearColorMapper(palette=list(self.palette), low=-0.5, high=len(self.palette) - 0.5)
        copies: list[dict[str, Any]] = []
        while not copies or copies[-1]["factor"] * FRAME < max(rows, width):
            factor = 2 ** len(copies)
            source = ColumnDataSource({"image": [np.zeros((1, 1), np.uint8)]}, name=f"copy {factor}")
            covered = {"dw": -(-width // factor) * factor, "dh": -(-rows // factor) * factor}
            image = plot.image("image", x=-0.5, y=-0.5, **covered, color_mapper=mapper, source=source, visible=False)
            copies.append({"source": source, "renderer": image, "factor": factor})
        if self.ticks is not None:
            bar = ColorBar(
                color_mapper=mapper, ticker=FixedTicker(ticks=list(self.ticks)), padding=8,
                major_label_overrides=dict(self.ticks), display_low=min(self.ticks), display_high=max(self.ticks),
            )  # fmt: skip
            plot.add_layout(bar, "right")
        return copies

    def _grids(self, plot: figure) -> list[Grid]:
        """Lines between cells, for a close look."""
        grids = [
            Grid(dimension=axis, ticker=FixedTicker(ticks=np.arange(count + 1) - 0.5), grid_line_color="#DDDDDD")
            for axis, count in enumerate(reversed(self._shape))
        ]
        for grid in grids:
            grid.level = "overlay"
            plot.add_layout(grid)
        return grids

    def _add_hover(self, plot: figure, source: ColumnDataSource) -> None:
        rows, width = self._shape
        everywhere = plot.quad(
            left=-0.5, right=width - 0.5, top=-0.5, bottom=rows - 0.5, fill_alpha=0, line_alpha=0, name="pairs"
        )
        name, code = self.value
        at = "const cell = source.data.image[0][Math.round(special_vars.y) * width + Math.round(special_vars.x)];\n"
        formatters = {
            "$y": CustomJSHover(args={"side": self.queries}, code=LABEL),
            "$x": CustomJSHover(args={"side": self.keys}, code=LABEL),
            "$name": CustomJSHover(args={"source": source, "width": width}, code=at + code),
        }
        tooltip = _table({"query": "$y{custom}", "key": "$x{custom}", name: "$name{custom}"})
        plot.add_tools(
            HoverTool(renderers=[everywhere], tooltips=tooltip, formatters=formatters, point_policy="follow_mouse")
        )

    def _with_strips(self, plot: figure, strips: Sequence[ColumnDataSource]) -> Any:
        """The plot with the roles of queries and keys along its sides, and the keys' position ids below.

        The page's script fills `strips`, those of queries and keys, with a bar for each run of tokens of one role.
        """
        left_strip = figure(frame_width=STRIP, frame_height=FRAME, min_border=0, x_range=(0, 1), y_range=plot.y_range)
        below = figure(frame_width=FRAME, frame_height=STRIP, min_border=0, x_range=plot.x_range, y_range=(0, 1))
        left_strip.quad(left=0, right=1, top="start", bottom="end", color="colour", source=strips[0])
        below.quad(left="start", right="end", top=0, bottom=1, color="colour", source=strips[1])
        rows: list[list[Any]] = [[left_strip, plot], [None, below]]
        axes = [name for name in self.keys.data if name.startswith("position")]
        if axes:
            below.xaxis.visible = False
            rows.append([None, self._position_ids(plot, axes)])
        left_strip.yaxis.axis_label, rows[-1][1].xaxis.axis_label = "query", "key"
        for strip in (left_strip, below):
            strip.grid.visible = False
            strip.toolbar.tools = []
        left_strip.xaxis.visible = below.yaxis.visible = False
        for panel in filter(None, chain(*rows)):
            panel.toolbar.active_scroll, panel.toolbar.logo = plot.select_one(WheelZoomTool), None
            panel.lod_threshold = None
        grid = gridplot(rows, toolbar_location="right")
        grid.spacing = 3
        return grid

    def _position_ids(self, plot: figure, axes: Sequence[str]) -> figure:
        few = self._shape[1] <= 128
        look: dict[str, Any] = {"color": PLAIN}
        if "colour" in self.keys.data:
            look = {"color": "colour", "marker": "marker"}
        ids = figure(
            frame_width=FRAME, frame_height=150, min_border=0, x_range=plot.x_range, tools="", y_axis_location="right",
            window_axis="x", name="positions",
        )  # fmt: skip
        dots = [
            ids.scatter(
                "place", name, size=8 if few else 4, line_color="black" if few else None, source=self.keys, **look
            )
            for name in axes
        ]
        ids.add_tools(HoverTool(renderers=dots, tooltips=_table({"key": "@label"})))
        ids.yaxis.axis_label = "position id"
        return ids

    def _legend(self) -> str:
        colours = {colour for side in (self.queries, self.keys) for colour in side.data.get("colour", ())}
        roles = [role for role in Role if ROLE_COLOURS[role] in colours]
        names = [f'<b style="background:{ROLE_COLOURS[role]}"></b>{role.name}' for role in roles]
        return " Roles, also along the sides:" + "".join(names) if names else ""


def _table(rows: Mapping[str, str]) -> str:
    """What a hover box says, in HTML; values that Bokeh puts in are escaped by it."""
    cells = "".join(
        f'<tr><th style="text-align:right">{name}</th><td>{value}</td></tr>' for name, value in rows.items()
    )
    return f'<table style="font-size:13px;color:#222;white-space:pre">{cells}</table>'
