"""Prompts with images, as the chat template and the processor of a vision-language model make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gistkit.hf.vision import Vision


def check_chat(processor: Any) -> None:
    """Refuses a processor without a chat template."""
    if not getattr(processor, "chat_template", None):
        raise ValueError(f"processor: expected one with a chat template, got {type(processor).__name__} without")


def chat_prompt(processor: Any, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a processor returns for messages and the beginning of an answer: input_ids [1, N], pixel_values and others.

    Args:
        processor: the model's own, with a chat template and a tokenizer.
        messages: as the processor's `apply_chat_template` takes them.
    """
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    return dict(inputs)


def image_prompt(processor: Any, images: Sequence[Any], question: str = "") -> dict[str, Any]:
    """What a processor returns for one message of images and a question behind them.

    `VoCo.split` cuts it into the context, which is the same whatever is asked, and the text behind the images, which is
    the same whatever they are: `blank` can stand for them.

    Args:
        processor: as in `chat_prompt`.
        images: PIL images, or the paths of their files.
        question: no text if empty.
    """
    content: list[dict[str, Any]] = [
        {"type": "image", "path": image} if isinstance(image, str) else {"type": "image", "image": image}
        for image in images
    ]
    if question:
        content.append({"type": "text", "text": question})
    return chat_prompt(processor, [{"role": "user", "content": content}])


def blank() -> Any:
    """A black PIL image, where only the text around it matters."""
    from PIL import Image

    return Image.new("RGB", (64, 64))


def tile_separators(model: nn.Module, processor: Any) -> list[int]:
    """Ids of the tokens that a processor writes between the tiles of one image, for `VoCo`'s `separators`.

    Args:
        model: a vision-language model, see `Vision`.
        processor: as in `chat_prompt`.

    Returns:
        Those of an image with as many tiles as the processor makes; none for models whose images are not in tiles.
    """
    vision = Vision(model)
    if not vision.family.tiles:
        return []
    ids = torch.as_tensor(image_prompt(processor, [blank()])["input_ids"]).flatten().tolist()
    places = [place for place, token in enumerate(ids) if token == vision.image_token]
    return sorted(set(ids[places[0] : places[-1]]) - {vision.image_token})
