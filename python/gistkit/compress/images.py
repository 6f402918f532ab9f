"""Images in texts: what a vision-language model's processor returned, as rows, and the plan of a pass over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gistkit.common.checks import placed
from gistkit.compress.plans import KEPT, Places, compiled
from gistkit.compress.tokens import Rows, as_rows
from gistkit.hf.vision import Vision, VisionFamily
from gistkit.layouts import Layout, Plan
from gistkit.layouts.relations import Role


class ImageRows(Rows):
    """`Rows` with images: `ids` has 0 instead of image tokens.

    Attributes:
        is_image: bool [B, N], the image tokens.
        pixels: what the vision tower reads, `gistkit.hf.vision.Vision.pixels`.
    """

    is_image: Tensor
    pixels: Mapping[str, Tensor]


def marked(vision: Vision, lm: Any, inputs: Any, attention_mask: Any) -> tuple[Rows, Tensor]:
    """Token ids of a processor's output, checked, on the model's device, and which are image tokens, bool [B, N]."""
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"input_ids: expected the output of the {vision.name} model's own processor, with pixel_values, got "
            f"{type(inputs).__name__}"
        )
    # The image token of some models is none of the vocabulary.
    known = max(lm.vocabulary, vision.image_token + 1)
    tokens = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    rows = as_rows("input_ids", tokens, attention_mask, vocabulary=known, device=lm.device, shortest=1)
    is_image = (rows.ids == vision.image_token) & rows.valid
    largest = int(rows.ids.masked_fill(is_image, 0).max())
    if largest >= lm.vocabulary:
        raise ValueError(f"input_ids: expected token ids in [0, {lm.vocabulary}), got {largest}")
    return rows, is_image


def joined(tokens: Sequence[int], parts: Sequence[tuple[int, int]], separators: Sequence[int]) -> list[tuple[int, int]]:
    """Images [start, end) of a row, from parts between which only separators stand."""
    images = [parts[0]]
    for start, end in parts[1:]:
        between = tokens[images[-1][1] : start]
        joins = between and {*between} <= {*separators}
        images[-1:] = [(images[-1][0], end)] if joins else [images[-1], (start, end)]
    return images


class ImageRow(NamedTuple):
    """One row: [before], then for each image [vision][gap], and the tokens after it.

    Args:
        before: tokens before the first image.
        vision: tokens of each image.
        after: tokens after each image and its gap.
        ids: position IDs of a model that does not count tokens, [A, n] int64 as bytes; empty for others.
    """

    before: int
    vision: tuple[int, ...]
    after: tuple[int, ...]
    ids: bytes


def image_rows(
    rows: ImageRows, features: Sequence[Tensor], vision: Vision, gap: int, separators: Sequence[int]
) -> tuple[ImageRow, ...]:
    """Rows whose images have these features.

    Args:
        gap: tokens after an image that its memory tokens sum up with it.
        separators: token ids; image tokens with only these between them are one image.
    """
    parts = vision.parts(rows.is_image, features)
    ids = vision.position_ids(rows.is_image, rows.valid, rows.pixels)
    found = []
    for row, (tokens, spans) in enumerate(zip(rows.lists(), parts, strict=True)):
        starts, ends = zip(*joined(tokens, spans, separators), strict=True)
        after = tuple(start - end - gap for start, end in zip((*starts[1:], len(tokens)), ends, strict=True))
        if min(after) < 0:
            raise ValueError(
                f"gap: expected at least {gap} tokens after each image, got {min(after) + gap} in row {row}"
            )
        own = b"" if ids is None else ids[:, row, : len(tokens)].cpu().numpy().tobytes()
        found.append(
            ImageRow(starts[0], tuple(end - start for start, end in zip(starts, ends, strict=True)), after, own)
        )
    return tuple(found)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImagePass(Places):
    """One pass over rows with images, in logical order.

    Args:
        plan: of the pass, padded at the end of rows.
        sources: int64 [B, N], the column of each token in [tokens of the row, padded][memory tokens of an image].
        kept: int64 [B, K], the columns of the pass that the memory keeps: memory tokens, and text that later text sees.
    """

    plan: Plan
    sources: Tensor
    kept: Tensor


@lru_cache(maxsize=KEPT)
def image_pass(
    rows: tuple[ImageRow, ...], config: Any, family: VisionFamily, columns: int, windows: tuple[int, ...], device: str
) -> ImagePass:
    """The pass over rows with images.

    Args:
        config: the VoCo's, whose layout it is; plans are kept by it.
        columns: tokens of the longest row.
    """
    made = {row: config.layout_of(row, family) for row in rows}
    taken = {row: one.take(slice(0, -1)) for row, one in made.items()}
    full, parts = ([layout[row] for row in rows] for layout in (made, taken))
    kept = [_kept(part, config.text_sees_before) for part in parts]
    sources = []
    for part in parts:
        memory = part.roles == Role.MEMORY
        sources.append(
            np.where(memory, columns + (np.cumsum(memory) - 1) % config.memory_tokens, np.cumsum(~memory) - 1)
        )
    positions = [part.positions.T[index] for part, index in zip(parts, kept, strict=True)]
    with torch.inference_mode(False):
        plan = compiled(parts, windows, device, grouped=False)
        return ImagePass(
            lengths=tuple(map(len, kept)),
            positions=_padded(positions),
            starts=tuple(int(one.positions.T[-1].max()) for one in full),
            last=max(int(part.positions.max()) for part in parts),
            last_rows=placed([len(part) - 1 for part in parts], device),
            ordinals=_padded([part.ordinals[index] for part, index in zip(parts, kept, strict=True)]),
            plan=plan,
            sources=placed(_padded(sources), device),
            kept=placed(_padded(kept), device),
        )


def _kept(part: Layout, text_sees_before: bool) -> NDArray[np.int64]:
    """The tokens that text after a row sees."""
    text = part.roles == Role.TEXT
    if not text_sees_before:
        text &= part.segments > part.segments[part.roles == Role.MEMORY].max()
    return np.flatnonzero(text | (part.roles == Role.MEMORY))


def _padded(rows: Sequence[NDArray[Any]]) -> Tensor:
    """int64 [B, N, ...] of arrays [n, ...], zeros after them."""
    return pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], batch_first=True)
