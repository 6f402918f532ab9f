"""What a memory saves: bars of seconds and bytes, compared with the full text."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, Picture


def draw_savings(ways: Mapping[str, tuple[float, int]]) -> Figure:
    """Draws seconds per answer and megabytes of keys and values, one bar per way; the last is highlighted.

    Args:
        ways: {name: (seconds, bytes)}.

    Raises:
        ValueError: if there is none.
    """
    if not ways:
        raise ValueError("draw_savings: expected at least one way to answer, got none")
    figure = Picture(figsize=(8, 0.9 + 0.5 * len(ways)), layout="constrained", dpi=120)
    panels = figure.subplots(1, 2, sharey=True)
    colours = [COLOURS["grey"]] * (len(ways) - 1) + [COLOURS["blue"]]
    for axes, title, values, text in (
        (panels[0], "seconds an answer", [seconds for seconds, _ in ways.values()], "{:.2f} s"),
        (panels[1], "keys and values kept", [count / 1e6 for _, count in ways.values()], "{:.1f} MB"),
    ):
        bars = axes.barh(list(ways), values, color=colours, height=0.6)
        axes.bar_label(bars, [text.format(value) for value in values], padding=3)
        axes.set_title(title, loc="left")
        axes.set_xlim(0, 1.25 * max(values))
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].invert_yaxis()
    return figure
