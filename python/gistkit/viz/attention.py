"""Attention maps: recorded maps, and maps of memory tokens over the context with slope and focus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from gistkit.common.checks import one_of
from gistkit.inspect import AttentionMap, measure_tracking
from gistkit.layouts.relations import Role
from gistkit.viz.layout import ROLE_COLOURS
from gistkit.viz.style import COLOURS, FigureOrAxes, Picture, axes_of

SCALES = ("linear", "log")
# Below this part of the largest weight a logarithmic scale has one colour.
FAINTEST = 1e-4


def draw_attention(
    recorded: AttentionMap,
    *,
    head: int | None = None,
    sequence: int | None = None,
    scale: str = "linear",
    key_roles: Sequence[int] | ArrayLike | None = None,
    query_roles: Sequence[int] | ArrayLike | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> FigureOrAxes:
    """Draws one attention map, one row per query; hidden keys are white.

    On the linear scale the darkest colour starts at the 98% quantile of the weights above 0; the logarithmic scale goes
    down to 10^-4 of the largest weight.

    Args:
        recorded: a map of `AttentionRecorder`.
        head: one of `recorded.heads`; None is the first, or the mean of all if that was recorded.
        sequence: one of `recorded.batch`; None is the first.
        scale: "linear" or "log".
        key_roles: `Role` of each key, in physical order as the map's; drawn as a strip below the map. None: no strip.
        query_roles: `Role` of each recorded query row, for a strip on the left.
        title: a heading; None says layer and head.
        ax: axes to draw into.

    Raises:
        ValueError: if the map lacks the head or sequence, or is empty, or the number of roles differs from the tokens'.
    """
    one_of("draw_attention", "scale", scale, SCALES)
    mean = recorded.weights.shape[1] == 1 < len(recorded.heads)
    if mean and head is not None:
        raise ValueError(f"head: expected None for a map that is a mean over heads, got {head}")
    h = 0 if mean else _place("head", head, recorded.heads)
    weights = recorded.weights[_place("sequence", sequence, recorded.batch), h].double().numpy()
    if not weights.size:
        raise ValueError(f"recorded: expected a map with queries and keys, got {list(weights.shape)}")
    rows, keys = weights.shape
    result, ax = axes_of(ax, (6.2, 5.2))
    visible = np.ma.masked_equal(weights, 0)
    norm, extend = _norm(visible, scale)
    image = ax.imshow(
        visible, aspect="auto", cmap="magma_r", norm=norm, interpolation="nearest", extent=(0, keys, rows, 0)
    )
    ax.set(xlim=(0, keys), ylim=(rows, 0), xlabel="key", ylabel="query")
    present = {*_strip(ax, "x", "key_roles", key_roles, keys), *_strip(ax, "y", "query_roles", query_roles, rows)}
    if present:
        handles = [Patch(color=ROLE_COLOURS[role], label=role.name) for role in sorted(present)]
        ax.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False, fontsize=8
        )
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: str(int(recorded.rows[int(y)])) if 0 <= y < rows else ""))
    ax.figure.colorbar(image, ax=ax, label="attention weight", extend=extend)
    head_name = f"mean of {len(recorded.heads)} heads" if mean else f"head {recorded.heads[h]}"
    heading = f"Layer {recorded.layer}, {head_name}" if title is None else title
    ax.set_title(heading, loc="left", pad=22 if present else None)
    return result


def draw_memory_map(
    weights: ArrayLike, *, ratio: float | None = None, title: str | None = None, ax: Axes | None = None
) -> FigureOrAxes:
    """Attention of memory tokens over the context, the line of even coverage, and measured and expected figures.

    The text gives how far the peak and the centre of mass of attention move, and how far they would under even
    coverage, in context tokens for each memory token; and the focus, the share of a memory token's attention in its own
    L / M tokens. See `gistkit.inspect.Tracking`, and `line_angle` for the paper's angles.

    Args:
        weights: [M, L], M at least 2; each row of any scale.
        ratio: context tokens per memory token; None: L / M. title: a heading above the text.
        ax: axes to draw into.

    Raises:
        ValueError: as of `gistkit.inspect.measure_tracking`, or if the ratio is not above 0.

    Paper: Position IDs Matter, Section 5.2 and Figures 6 and 7.
    """
    values = torch.as_tensor(np.asarray(weights, dtype=np.float64))
    tracking = measure_tracking(values)
    memory, context = values.shape
    ratio = context / memory if ratio is None else ratio
    if not ratio > 0:
        raise ValueError(f"ratio: expected context tokens above 0, got {ratio:g}")
    single = ax is None
    result, ax = axes_of(ax, (5.6, 3.0))
    total = values.sum(-1, keepdim=True)
    share = (values / total.where(total > 0, 1)).numpy()
    image = ax.imshow(share, aspect="auto", cmap="magma_r", vmin=0, vmax=1 / ratio, interpolation="nearest")
    slots = np.arange(memory)
    ax.plot((slots + 0.5) * ratio - 0.5, slots, color=COLOURS["sky"], linewidth=1.4, linestyle="--")
    ax.set(xlim=(-0.5, context - 0.5), ylim=(memory - 0.5, -0.5))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    text = (
        "From one memory token to the next, attention moves on\n"
        f"by {_tokens(tracking.peak_slope)} context tokens at its peak, {_tokens(tracking.slope)} on average\n"
        f"(even: {_tokens(ratio)}); {tracking.own_segment:.0%} stays in the token's part (flat: {1 / memory:.0%})"
    )
    ax.set_title(text, loc="left", fontsize=8)
    if title is not None:
        ax.annotate(title, (0, 1), (0, 38), xycoords="axes fraction", textcoords="offset points", fontsize=11)
    if single:
        ax.set(xlabel="context token", ylabel="memory token")
        ax.figure.colorbar(image, ax=ax, label="share of attention", extend="max")
    return result


def draw_memory_attention(
    maps: Mapping[str, Sequence[ArrayLike]], ratio: float | None = None, first_layer: int = 0
) -> Figure:
    """Attention of memory tokens over the context: a row a layer, a column a layout, by `draw_memory_map`.

    Args:
        maps: for each layout its layers' weights [M, L], of one shape.
        ratio: context tokens a memory token stands for; None is L / M.
        first_layer: number of the first layer given.
    """
    if not maps or not all(len(layer_maps) for layer_maps in maps.values()):
        raise ValueError(f"maps: expected at least one layout and a layer of each, got {list(maps) or 'none'}")
    # Panels share their axes and colours.
    shapes = {np.shape(weights) for layer_maps in maps.values() for weights in layer_maps}
    if len(shapes) > 1:
        raise ValueError(f"maps: expected weights [M, L] of one shape, got {', '.join(map(str, sorted(shapes)))}")
    layers = max(len(layer_maps) for layer_maps in maps.values())
    figure = Picture(figsize=(max(5.6, 1.2 + 3.6 * len(maps)), 1.2 + 2.0 * layers), layout="constrained", dpi=110)
    grid = figure.subplots(layers, len(maps), squeeze=False, sharex=True, sharey=True)
    for column, (layout, layer_maps) in enumerate(maps.items()):
        for row, weights in enumerate(layer_maps):
            axes = grid[row][column]
            draw_memory_map(weights, ratio=ratio, title=None if row else layout.upper(), ax=axes)
            if row == layers - 1:
                axes.set_xlabel("context token")
            if column == 0:
                axes.set_ylabel(f"layer {first_layer + row}\nmemory token")
    image = grid[0][0].images[0]
    figure.colorbar(image, ax=grid, label="share of attention", extend="max", shrink=0.8)
    heading = "Where memory tokens look (dashed: even coverage)"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    return figure


def _tokens(slope: float) -> str:
    """A slope; one that rounds to 0 has no sign."""
    return f"{round(slope, 1) + 0.0:.1f}"


def _place(name: str, number: int | None, numbers: Sequence[int]) -> int:
    """The index of `number` among the recorded numbers; None is the first."""
    if number is None and numbers:
        return 0
    if number not in numbers:
        raise ValueError(f"{name}: expected one of the recorded {', '.join(map(str, numbers)) or 'none'}, got {number}")
    return numbers.index(number)


def _norm(visible: Any, scale: str) -> tuple[Normalize, str]:
    """The colour scale of weights, and the ends at which weights exceed it."""
    values = visible.compressed()
    if not values.size:
        return Normalize(0, 1), "neither"
    highest = float(values.max())
    if scale == "log":
        return LogNorm(
            highest * FAINTEST, highest, clip=True
        ), "min" if values.min() < highest * FAINTEST else "neither"
    limit = float(np.quantile(values, 0.98))
    return Normalize(0, limit), "max" if highest > limit else "neither"


def _strip(ax: Axes, axis: Literal["x", "y"], name: str, roles: Any, count: int) -> list[Role]:
    """Draws the role of each token along one side of the map; returns the roles that occur."""
    if roles is None:
        return []
    numbers: NDArray[np.int64] = np.asarray(roles).astype(np.int64)
    if numbers.shape != (count,):
        raise ValueError(f"{name}: expected {count} roles, one for each of the map's tokens, got {numbers.shape}")
    if not np.isin(numbers, list(Role)).all():
        raise ValueError(
            f"{name}: expected roles {min(Role):d} to {max(Role):d}, got {numbers.min()} to {numbers.max()}"
        )
    palette = ListedColormap([ROLE_COLOURS[role] for role in Role])
    # Between the map and its tick labels.
    bounds = (0, -0.035, 1, 0.025) if axis == "x" else (-0.035, 0, 0.025, 1)
    strip = ax.inset_axes(bounds)
    image = numbers[None] if axis == "x" else numbers[:, None]
    strip.imshow(image, aspect="auto", cmap=palette, vmin=-0.5, vmax=len(Role) - 0.5, interpolation="nearest")
    strip.set(xticks=[], yticks=[])
    ax.tick_params(axis=axis, pad=14)
    return [Role(int(number)) for number in np.unique(numbers)]
