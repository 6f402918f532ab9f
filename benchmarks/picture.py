"""Draws a suite of attention, time against visible area with the roof as a line, or one of streaming.py or asking.py.

Of attention only cases of head dim 64 in float32 are drawn, so that one line is the roof of all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import suites
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

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
STREAMING: dict[str, dict[str, Any]] = {
    "gistkit, mixed resolution, strided": {"color": COLOURS["blue"], "marker": "o", "linestyle": "-"},
    "gistkit, mixed resolution, learned": {"color": COLOURS["sky"], "marker": "D", "linestyle": "--"},
    "gistkit, Compressive": {"color": COLOURS["orange"], "marker": "^", "linestyle": "-"},
    "gistkit, memory of 500x": {"color": COLOURS["purple"], "marker": "P", "linestyle": "-"},
    "gistkit, memory of GistPool": {"color": COLOURS["black"], "marker": "X", "linestyle": "--"},
    "gistkit, full context": {"color": COLOURS["green"], "marker": "v", "linestyle": "-."},
    "transformers sdpa, full context": {"color": COLOURS["red"], "marker": "s", "linestyle": ":"},
}
PASSES = {"forward": 1.0, "forward + backward": 3.5}


def drawn(cases: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the picture of attention shows any of the cases."""
    return any(_shown(case) for case in cases)


def _shown(case: Mapping[str, Any]) -> bool:
    return case.get("dim") == DIM and case["dtype"] == "float32"


def draw_attention(content: Mapping[str, Any]) -> Figure:
    """A panel a pass: milliseconds against visible pairs over all heads, log-log, a point a case and form."""
    cases = {case["name"]: case for case in content["cases"] if _shown(case)}
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
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        tidy(axes)
    left, right = panels[0].get_xlim()
    panels[0].set_xlim(left, 2.5 * right)  # room for the lines' names
    panels[0].set_ylabel("milliseconds (median)")
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
    _head(figure, f"Attention, head dim {DIM}, float32: time against visible area", content["machine"])
    return figure


def draw_streaming(content: Mapping[str, Any]) -> Figure:
    """Milliseconds a token, and MiB of cache, against the tokens read, a line a contender."""
    figure = Picture(figsize=(9.6, 4.4), layout="constrained")
    time, cache = figure.subplots(1, 2)
    rows = sorted(content["milliseconds"], key=lambda row: row["tokens"])
    lengths = sorted({row["tokens"] for row in rows})
    for form, style in STREAMING.items():
        here = [row for row in rows if row["form"] == form]
        for axes, value in ((time, "mean"), (cache, "mib")):
            if here:
                points = [(row["tokens"], row[value]) for row in here]
                axes.plot(*zip(*points, strict=True), label=form, markersize=5, **style)
    for axes, title in ((time, f"milliseconds a token (mean of {content['window']})"), (cache, "cache, MiB")):
        axes.set_title(title, loc="left")
        axes.margins(y=0.1)
        axes.set(xlabel="tokens read", xticks=lengths, xlim=(0, None), ylim=(0, None))
        axes.tick_params("x", labelsize=8)
        tidy(axes)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    setting = f"nuggets {content['ratio']}x, tau {content['tau']}, segment {content['segment']}"
    _head(figure, f"Reading on token by token, SmolLM2-135M {content['dtype']}; {setting}", content["machine"])
    return figure


def draw_asking(content: Mapping[str, Any]) -> Figure:
    """Seconds after each answer, and MiB kept of the document with how many answers are right, a line a contender."""
    figure = Picture(figsize=(9.6, 4.4), layout="constrained")
    time, kept = figure.subplots(1, 2)
    rows = content["rows"]
    colours = [COLOURS[name] for name in ("blue", "sky", "purple", "orange", "green")]
    for index, row in enumerate(rows):
        full = index == len(rows) - 1
        style = {"color": COLOURS["red"], "linestyle": ":", "marker": "s"} if full else {"color": colours[index % 5],
                 "marker": "o"}  # fmt: skip
        answers = range(1, 1 + len(row["seconds"]))
        time.plot(answers, row["seconds"], label=row["form"], markersize=5, **style)
        kept.barh(index, row["mib"], color=style["color"], height=0.4)
        text = f"{row['mib']:.0f} MiB, {row['within']:.0f}% right"
        kept.annotate(text, (row["mib"], index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    time.set_title("seconds since the document was given", loc="left")
    time.set(xlabel="answers written", xticks=range(1, 1 + len(rows[0]["seconds"])), ylim=(0, None))
    kept.set_title("kept of the document, and right answers", loc="left")
    kept.set(xlabel="MiB", yticks=[], xlim=(0, 1.5 * max(row["mib"] for row in rows)), ylim=(-0.6, len(rows) - 0.4))
    kept.invert_yaxis()
    for axes in (time, kept):
        tidy(axes)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    title = f"Ten questions about {content['tokens']} tokens, SmolLM2-135M {content['dtype']}"
    _head(figure, title, content["machine"])
    return figure


def _head(figure: Figure, title: str, machine: Mapping[str, Any]) -> None:
    """What is shown, and what it was made on."""
    figure.suptitle(
        f"{title}\n"
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, commit {machine['commit']}",
        x=0.01,
        ha="left",
        fontsize=10,
    )


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


def draw(path: Path, suite: str, out: Path | None = None) -> Path:
    """Draws a suite of a file of suites as a PNG file, by default SUITE.png beside it; returns the file."""
    content = suites.read(path)[suite]
    out = out or path.with_name(f"{suite}.png")
    drawing = {"streaming": draw_streaming, "asking": draw_asking}.get(content["suite"], draw_attention)
    drawing(content).savefig(out, dpi=150)
    return out


def main() -> None:
    """Draws a suite as a PNG file."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/picture.py benchmarks/results/intel-xeon-avx512/suites.json attention",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("json", type=Path, help="a file of suites")
    parser.add_argument("suite", help="one of its suites of attention.py, streaming.py or asking.py")
    parser.add_argument("--out", type=Path, help="default: SUITE.png beside the file")
    options = parser.parse_args()
    if options.suite not in (found := suites.read(options.json)):
        parser.error(f"suite: expected one of {', '.join(found) or 'none, as the file has none'}, got {options.suite}")
    print(f"wrote {draw(options.json, options.suite, options.out)}")


if __name__ == "__main__":
    main()
