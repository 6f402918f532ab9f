"""Rows of tokens with images among them, and the one pass that compresses these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gistkit import layouts
from gistkit.compress.tokens import Rows
from gistkit.layouts import Layout, Plan, Role


class ImageRows(Rows):
    """`Rows` with images: `ids` has 0 in place of image tokens.

    Attributes:
        is_image: bool [B, N], the image tokens.
        pixels: what the vision tower reads, `gistkit.hf.vision.Vision.pixels`.
    """

    is_image: Tensor
    pixels: Mapping[str, Tensor]


class ImageRow(NamedTuple):
    """One row: [before], then for each image [vision][gap], and the tokens after it.

    Args:
        before: tokens before the first image.
        vision: tokens of each image.
        after: tokens after each image and its gap.
        ids: position ids of a model that does not count tokens, [A, n] int64 as bytes; empty for others.
    """

    before: int
    vision: tuple[int, ...]
    after: tuple[int, ...]
    ids: bytes


@dataclass(frozen=True)
class ImageLayout:
    """How the rows of one compressor are laid out, see `gistkit.layouts.voco`.

    Args:
        memory: VoCo tokens of each image.
        positions, gap, text_sees_before, bidirectional: as there.
        axes: of position ids.
    """

    memory: int
    positions: str
    gap: int
    text_sees_before: bool
    bidirectional: bool
    axes: int

    def __call__(self, row: ImageRow) -> Layout:
        """The layout of a row and one more token of text."""
        ids = None
        if row.ids:
            own = np.frombuffer(row.ids, np.int64).reshape(self.axes, -1)
            ids = np.pad(own, ((0, 0), (0, 1)), constant_values=own.max() + 1)
        return layouts.voco(
            row.vision,
            self.memory,
            row.after[-1] + 1,
            before=row.before,
            between=row.after[:-1],
            gap=self.gap,
            positions=self.positions,
            text_sees_before=self.text_sees_before,
            bidirectional=self.bidirectional,
            ids=ids,
        )


def image_row(
    length: int, images: Sequence[tuple[int, int]], gap: int, ids: NDArray[np.int64] | None, name: str
) -> ImageRow:
    """A row of `length` tokens whose images are [start, end).

    Args:
        gap: tokens behind an image that its memory tokens sum up with it.
        ids: position ids [A, length] of the row; None: the model counts tokens.
        name: of the row in messages.
    """
    starts, ends = zip(*images, strict=True)
    after = tuple(start - end - gap for start, end in zip((*starts[1:], length), ends, strict=True))
    if min(after) < 0:
        raise ValueError(f"gap: expected at least {gap} tokens behind each image, got {min(after) + gap} in {name}")
    contents = b"" if ids is None else np.ascontiguousarray(ids[:, :length], np.int64).tobytes()
    return ImageRow(starts[0], tuple(end - start for start, end in images), after, contents)


@dataclass(frozen=True, eq=False)
class ImagePass:
    """One pass over rows with images, in logical order, and which of its tokens the memory keeps.

    Args:
        plan: of the pass, padded at the end of rows.
        sources: int64 [B, N], the column of each token in [tokens of the row, padded][memory tokens of an image].
        kept: int64 [B, K], the columns of the pass that the memory keeps: memory tokens, and text that later text sees.
        lengths: kept tokens of each row.
        positions: int64 [B, K] or [B, K, A] on the CPU, position ids of the kept tokens.
        ordinals: int64 [B, K] on the CPU, their places in logical order.
        starts: position id of the text that follows each row.
        last_rows: int64 [B], the column of each row's last token.
        last: the largest position id of the pass.
    """

    plan: Plan
    sources: Tensor
    kept: Tensor
    lengths: tuple[int, ...]
    positions: Tensor
    ordinals: Tensor
    starts: tuple[int, ...]
    last_rows: Tensor
    last: int


@lru_cache(maxsize=64)
def image_pass(
    rows: tuple[ImageRow, ...], layout: ImageLayout, columns: int, windows: tuple[int, ...], device: str
) -> ImagePass:
    """The pass over rows with images.

    Args:
        rows: of the batch.
        layout: of all rows.
        columns: tokens of the longest row.
        windows: sliding windows of the model.
        device: where the plan goes.
    """
    full = [layout(row) for row in rows]
    parts = [one.take(slice(0, -1)) for one in full]
    kept = [_kept(part, layout.text_sees_before) for part in parts]
    sources = []
    for part in parts:
        memory = part.roles == Role.MEMORY
        sources.append(np.where(memory, columns + (np.cumsum(memory) - 1) % layout.memory, np.cumsum(~memory) - 1))
    positions = [part.positions.T[index] for part, index in zip(parts, kept, strict=True)]
    with torch.inference_mode(False):
        plan = (
            parts[0].compile(grouped=False, windows=windows, device=device)
            if len(set(rows)) == 1
            else layouts.compile_batch(parts, grouped=False, windows=windows, device=device)
        )
        return ImagePass(
            plan,
            _padded(sources).to(device),
            _padded(kept).to(device),
            tuple(map(len, kept)),
            _padded(positions),
            _padded([part.ordinals[index] for part, index in zip(parts, kept, strict=True)]),
            tuple(int(one.positions.T[-1].max()) for one in full),
            torch.tensor([len(part) - 1 for part in parts], device=device),
            max(int(part.positions.max()) for part in parts),
        )


def _kept(part: Layout, text_sees_before: bool) -> NDArray[np.int64]:
    """The tokens that text behind a row sees."""
    text = part.roles == Role.TEXT
    if not text_sees_before:
        text &= part.segments > part.segments[part.roles == Role.MEMORY].max()
    return np.flatnonzero(text | (part.roles == Role.MEMORY))


def _padded(rows: Sequence[NDArray[Any]]) -> Tensor:
    """int64 [B, N, ...] of arrays [n, ...], zeros behind them."""
    padded = np.zeros((len(rows), max(map(len, rows)), *rows[0].shape[1:]), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)
