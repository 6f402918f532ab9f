"""VoCo: vision tokens that text sees only through the memory tokens after each image."""

from __future__ import annotations

import numpy as np

from gistkit._checks import at_least, one_of
from gistkit.layouts.layout import Layout
from gistkit.layouts.positions import upl
from gistkit.layouts.relations import CAUSAL, SEGMENT, SEGMENT_CAUSAL, Role


def voco(
    vision: int,
    memory: int,
    text: int = 0,
    *,
    before: int = 0,
    images: int = 1,
    positions: str = "epl",
    text_sees_before: bool = True,
) -> Layout:
    """VoCo: [text before], then [vision][memory] for each image, then [text]; text does not see vision tokens.

    Positions "dpl" count through all tokens from 0. With "epl" vision and text tokens have the ids of the sequence
    without memory tokens, counted from 0, which stays free for a BOS token if nothing stands before the first image;
    the memory tokens are spread over the ids of their image.

    Args:
        vision: vision tokens an image, at least 1.
        memory: memory (VoCo) tokens an image, at least 1.
        text: number of text tokens after the images, at least 0.
        before: number of text tokens before the first image (BOS and prompt), at least 0.
        images: number of images, at least 1.
        positions: "dpl" or "epl".
        text_sees_before: text after the images sees the text before them, as the paper says. In the released code it
            does not: False.

    Papers: VoCo-LLaMA; positions: Position IDs Matter (EPL).
    """
    vision = at_least("voco", "vision", vision, 1)
    memory = at_least("voco", "memory", memory, 1)
    text = at_least("voco", "text", text, 0)
    before = at_least("voco", "before", before, 0)
    images = at_least("voco", "images", images, 1)
    one_of("voco", "positions", positions, ("dpl", "epl"))
    image_roles = np.tile(np.repeat([Role.CONTEXT, Role.MEMORY], [vision, memory]), images)
    roles = np.concatenate([np.repeat(Role.TEXT, before), image_roles, np.repeat(Role.TEXT, text)])
    segments = np.concatenate([np.zeros(before), np.repeat(np.arange(images), vision + memory), np.ones(text)])
    ids = np.arange(len(roles))
    if positions == "epl":
        first = max(before, 1)
        ids[:before] = np.arange(before)
        for image in range(images):
            start, at = first + image * vision, before + image * (vision + memory)
            ids[at : at + vision] = np.arange(start, start + vision)
            ids[at + vision : at + vision + memory] = upl(start, start + vision - 1, memory)
        ids[len(ids) - text :] = first + images * vision + np.arange(text)
    return Layout(
        roles=roles,
        segments=segments.astype(np.int32),
        positions=ids,
        sees={
            Role.CONTEXT: {Role.CONTEXT: SEGMENT_CAUSAL, Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL},
            Role.MEMORY: {Role.CONTEXT: SEGMENT, Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL},
            Role.TEXT: {Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL if text_sees_before else SEGMENT_CAUSAL},
        },
        name=f"VoCo, {positions.upper()}",
    )
