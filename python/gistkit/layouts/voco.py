"""VoCo: text sees an image only through the memory tokens after it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gistkit.common.checks import at_least, one_of
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.positions import SCHEMES, upl
from gistkit.layouts.relations import CAUSAL, SEGMENT, SEGMENT_CAUSAL, Role


@example("VoCo, 2 images, EPL", vision=6, memory=2, text=5, before=1, images=2)
def voco(
    vision: int | Sequence[int],
    memory: int | Sequence[int],
    text: int = 0,
    *,
    before: int = 0,
    between: int | Sequence[int] = 0,
    gap: int = 0,
    images: int | None = None,
    positions: str = "epl",
    text_sees_before: bool = True,
    bidirectional: bool = False,
    ids: ArrayLike | None = None,
) -> Layout:
    """VoCo: [text before], then [vision][gap][memory] for each image with text between images, then [text].

    Text does not see vision tokens. It does not see the gap either: prompt tokens after an image that its memory tokens
    summarise with it. An image sees everything before it except other images and gaps.

    Positions "dpl" count all tokens from 0. "upl" spreads the memory tokens over the ids of their image's vision
    tokens. "epl" does so too, and all other tokens have the ids of the sequence without memory tokens, counted from 0;
    id 0 is left for a BOS token if nothing comes before the first image. With "cpl" the other tokens have these ids
    too, and memory tokens continue from the end of their image.

    Args:
        vision: vision tokens of each image, at least 1; one number for all images, or one for each.
        memory: memory (VoCo) tokens of each image, at least 1; one number for all images, or one for each.
        text: number of text tokens after the images, at least 0.
        before: number of text tokens before the first image (BOS and prompt), at least 0.
        between: number of text tokens after each image but the last, at least 0; one number, or images - 1 of them.
        gap: tokens between the vision tokens of each image and its memory tokens, at least 0; role CONTEXT.
        images: number of images, at least 1; None: the length of `vision` or `memory`, else 1.
        positions: "dpl", "upl", "cpl" or "epl".
        text_sees_before: text sees the text before the last image, as the paper says. In the released code it does
            not: False.
        bidirectional: vision tokens see their whole image, as in Gemma 3; requires a gap of 0.
        ids: int64 [N] or [A, N], the position IDs of the sequence without memory tokens in a model that does not count
            it from 0, such as the 3 axes of Qwen2.5-VL. Memory tokens are spread over the image's ids on each axis by
            itself, which is along its diagonal; where they count on, they have the same id on all axes, as text.

    Papers: VoCo-LLaMA; positions: Position IDs Matter (EPL).
    """
    if images is None:
        images = next((len(given) for given in (vision, memory) if isinstance(given, Sequence | np.ndarray)), 1)
    images = at_least("voco", "images", images, 1)
    patches = _of_each("vision", vision, images, 1)
    memories = _of_each("memory", memory, images, 1)
    texts = [*_of_each("between", between, images - 1, 0), at_least("voco", "text", text, 0)]
    before = at_least("voco", "before", before, 0)
    gap = at_least("voco", "gap", gap, 0)
    one_of("voco", "positions", positions, SCHEMES)
    if bidirectional and gap:
        raise ValueError(f"voco: expected gap 0 with bidirectional, got {gap}")
    consistent, spread = positions in ("cpl", "epl"), positions in ("upl", "epl")
    plain = _ids(ids, before + sum(patches) + images * gap + sum(texts), 0 if before or not consistent else 1)
    roles, segments, parts = [Role.TEXT] * before, [0] * before, [plain[:, :before]]
    # Tokens of `plain`, and memory tokens that are counted among them, so far.
    at, counted = before, 0
    for image, (seen, slots, after) in enumerate(zip(patches, memories, texts, strict=True)):
        end = at + seen + gap
        own = plain[:, at:end] + counted
        if spread:
            slot_ids = np.stack([upl(int(axis.min()), int(axis.max()), slots) for axis in own[:, :seen]])
        else:
            slot_ids = np.tile(own.max() + 1 + np.arange(slots), (len(plain), 1))
        parts += [own, slot_ids]
        counted += 0 if consistent else slots
        parts.append(plain[:, end : end + after] + counted)
        roles += [Role.CONTEXT] * (seen + gap) + [Role.MEMORY] * slots + [Role.TEXT] * after
        segments += [image] * (seen + gap + slots) + [image + 1] * after
        at = end + after
    all_ids = np.concatenate(parts, 1)
    return Layout(
        roles=np.array(roles, np.uint8),
        segments=np.array(segments, np.int32),
        positions=all_ids[0] if ids is None or np.ndim(ids) == 1 else all_ids,
        sees={
            Role.CONTEXT: {
                Role.CONTEXT: SEGMENT if bidirectional else SEGMENT_CAUSAL,
                Role.MEMORY: CAUSAL,
                Role.TEXT: CAUSAL,
            },
            Role.MEMORY: {Role.CONTEXT: SEGMENT, Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL},
            Role.TEXT: {Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL if text_sees_before else SEGMENT_CAUSAL},
        },
        name=f"VoCo, {positions.upper()}",
    )


def _ids(ids: ArrayLike | None, count: int, first: int) -> NDArray[Any]:
    """Position IDs [A, count] of the sequence without memory tokens."""
    if ids is None:
        return np.arange(first, first + count)[None]
    given = np.asarray(ids)
    if given.dtype.kind not in "iu" or given.ndim not in (1, 2) or given.shape[-1] != count:
        raise ValueError(
            f"voco: expected ids to be integers [{count}] or [A, {count}], one for each token but memory tokens, got "
            f"{given.dtype} of shape {given.shape}"
        )
    return np.atleast_2d(given).astype(np.int64)


def _of_each(name: str, value: int | Sequence[int], count: int, low: int) -> list[int]:
    """One number for each of `count` images."""
    if isinstance(value, Integral) or not isinstance(value, Sequence | np.ndarray):
        return [at_least("voco", name, value, low)] * count  # type: ignore[arg-type]
    if len(value) != count:
        raise ValueError(f"voco: expected {name} to be one number or {count}, got {len(value)}")
    return [at_least("voco", name, one, low) for one in value]
