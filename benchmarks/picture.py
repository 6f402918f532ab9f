"""Draws an attention suite's JSON: time against visible area, with the roof as a line.

Only cases of head dim 64 in float32 are drawn, so that one line is the roof of all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gistkit.viz.style import COLOURS, Picture, tidy

DIM = 64
# Marker, colour, fill: each form differs in shape, and ours are dark and filled, so grey prints read as well.
STYLE: dict[str, tuple[str, str, bool]] = {
    "gistkit avx512": ("o", COLOURS["blue"], True),
    "gistkit avx2": ("D", COLOURS["sky"], True),
    "gistkit generic": ("P", COLOURS["sky"], True),
    "SDPA, is_causal": ("s", COLOURS["red"], False),
    "SDPA, dense mask": ("^", COLOURS["red"], False),
    "FlexAttention, compiled": ("v", COLOURS["green"], False),
    "plain torch, compiled": ("x", COLOURS["black"], True),
    "plain torch, eager": ("+", COLOURS["black"], True),
}
PASSES = {"forward": 1.0, "forward + backward": 3.5}


def draw_attention(content: Mapping[str, Any]) -> Figure:
    """A panel a pass: milliseconds against visible pairs over all heads, log-log, a point a case and form.

    Args:
        content: the suite's JSON: machine, roof, cases with their sizes, milliseconds.
    """
    cases = {case["name"]: case for case in content["cases"] if case.get("dim") == DIM and case["dtype"] == "float32"}
    figure = Picture(figsize=(9.6, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    entries: dict[str, Any] = {}
    for axes, (name, factor) in zip(panels, PASSES.items(), strict=True):
        for form, (marker, colour, filled) in STYLE.items():
            points = [
                (cases[timing["case"]]["visible"], timing["median"])
                for timing in content["milliseconds"]
                if timing["form"] == form and timing["case"] in cases and cases[timing["case"]]["pass"] == name
            ]
            if points:
                face = colour if filled else "white"
                strokes = marker in "x+"
                entries[form] = axes.scatter(
                    *zip(*points, strict=True),
                    s=30 if strokes else 26,
                    marker=marker,
                    c=colour if strokes else face,
                    linewidths=1.1,
                    zorder=3 if filled else 2,
                    **({} if strokes else {"edgecolors": colour}),
                )
        _draw_roof(axes, content["roof"]["gflops"], list(cases.values()), 4 * DIM * factor)
        axes.set_title(name, loc="left")
        axes.set(xscale="log", yscale="log", xlabel="visible (query, key) pairs, all heads and sequences")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x * 1e-6:g} M")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        tidy(axes)
    left, right = panels[0].get_xlim()
    panels[0].set_xlim(left, 2.5 * right)  # room for the lines' names
    panels[0].set_ylabel("milliseconds (median)")
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
    machine = content["machine"]
    figure.suptitle(
        f"Attention, head dim {DIM}, float32: time against visible area\n"
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, commit {machine['commit']}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return figure


def _draw_roof(axes: Any, gflops: Mapping[str, list[float]], cases: list[Any], flops_a_pair: float) -> None:
    """A line an instruction set: the time that its multiply-add peak would need for the visible pairs alone."""
    areas = [case["visible"] for case in cases]
    ends = np.array([min(areas) / 1.6, max(areas) * 1.6])
    for isa, line in (("avx512", "-"), ("avx2", "--")):
        if isa in gflops:
            times = ends * flops_a_pair / gflops[isa][-1] * 1e-6
            axes.plot(ends, times, color="black", linewidth=0.9, linestyle=line, zorder=1)
            axes.annotate(
                f"roof\n{isa}",
                (ends[1], times[1]),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                linespacing=0.9,
            )


def main() -> None:
    """Draws a JSON file as a PNG file."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/picture.py benchmarks/results/amd-epyc-avx512/attention.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("json", type=Path, help="figures of the attention suite")
    parser.add_argument("--out", type=Path, help="default: the same name with .png")
    options = parser.parse_args()
    out = options.out or options.json.with_suffix(".png")
    draw_attention(json.loads(options.json.read_text())).savefig(out, dpi=150)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
