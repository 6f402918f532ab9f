"""VoCo: vision tokens that text sees only through the memory tokens after each image."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np

from gistkit._checks import at_least, one_of
from gistkit.layouts.layout import Layout
from gistkit.layouts.positions import upl
from gistkit.layouts.relations import CAUSAL, SEGMENT, SEGMENT_CAUSAL, Role


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
) -> Layout:
    """VoCo: [text before], then [vision][gap][memory] for each image with text between images, then [text].

    Text does not see vision tokens. Nor does it see the gap, tokens of the prompt behind an image that its memory
    tokens sum up with it. An image sees what stands before it but for other images and gaps.

    Positions "dpl" count through all tokens from 0. With "epl" all but memory tokens have the ids of the sequence
    without memory tokens, counted from 0, which stays free for a BOS token if nothing stands before the first image;
    the memory tokens are spread over the ids of their image's vision tokens.

    Args:
        vision: vision tokens of each image, at least 1; one number for all images, or one for each.
        memory: memory (VoCo) tokens of each image, at least 1; one number for all images, or one for each.
        text: number of text tokens after the images, at least 0.
        before: number of text tokens before the first image (BOS and prompt), at least 0.
        between: number of text tokens after each image but the last, at least 0; one number, or images - 1 of them.
        gap: tokens between the vision tokens of each image and its memory tokens, at least 0; role CONTEXT.
        images: number of images, at least 1; None is as many as `vision` or `memory` has numbers, else 1.
        positions: "dpl" or "epl".
        text_sees_before: text sees the text before the last image, as the paper says. In the released code it does
            not: False.

    Papers: VoCo-LLaMA; positions: Position IDs Matter (EPL).
    """
    if images is None:
        images = next((len(given) for given in (vision, memory) if isinstance(given, Sequence)), 1)
    images = at_least("voco", "images", images, 1)
    patches = _of_each("vision", vision, images, 1)
    memories = _of_each("memory", memory, images, 1)
    texts = [*_of_each("between", between, images - 1, 0), at_least("voco", "text", text, 0)]
    before = at_least("voco", "before", before, 0)
    gap = at_least("voco", "gap", gap, 0)
    one_of("voco", "positions", positions, ("dpl", "epl"))
    roles, segments, ids = [Role.TEXT] * before, [0] * before, list(range(before))
    # The next id of the sequence without memory tokens.
    start = max(before, 1)
    for image, (seen, spread, after) in enumerate(zip(patches, memories, texts, strict=True)):
        end = start + seen + gap
        roles += [Role.CONTEXT] * (seen + gap) + [Role.MEMORY] * spread + [Role.TEXT] * after
        segments += [image] * (seen + gap + spread) + [image + 1] * after
        ids += [*range(start, end), *upl(start, start + seen - 1, spread).tolist(), *range(end, end + after)]
        start = end + after
    return Layout(
        roles=np.array(roles, np.uint8),
        segments=np.array(segments, np.int32),
        positions=np.array(ids) if positions == "epl" else np.arange(len(ids)),
        sees={
            Role.CONTEXT: {Role.CONTEXT: SEGMENT_CAUSAL, Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL},
            Role.MEMORY: {Role.CONTEXT: SEGMENT, Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL},
            Role.TEXT: {Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL if text_sees_before else SEGMENT_CAUSAL},
        },
        name=f"VoCo, {positions.upper()}",
    )


def _of_each(name: str, value: int | Sequence[int], count: int, low: int) -> list[int]:
    """One number for each of `count` images."""
    if isinstance(value, Integral) or not isinstance(value, Sequence | np.ndarray):
        return [at_least("voco", name, value, low)] * count  # type: ignore[arg-type]
    if len(value) != count:
        raise ValueError(f"voco: expected {name} to be one number or {count}, got {len(value)}")
    return [at_least("voco", name, one, low) for one in value]
