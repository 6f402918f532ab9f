"""Prompts with images, made by the chat template and processor of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import nn

from gistkit.common.messages import one_line
from gistkit.hf.vision import Vision


def check_chat(processor: Any) -> None:
    """Refuses a processor without a chat template or a tokenizer."""
    if not hasattr(processor, "tokenizer"):
        raise ValueError(f"processor: expected the model's own, with a tokenizer, got {type(processor).__name__}")
    if not getattr(processor, "chat_template", None):
        raise ValueError(f"processor: expected one with a chat template, got {type(processor).__name__} without")


def chat_prompt(processor: Any, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a processor returns for messages and the beginning of an answer: input_ids [1, N], pixel_values and others.

    Args:
        processor: the model's own, with a chat template and a tokenizer.
        messages: as the processor's `apply_chat_template` takes them.

    Raises:
        ValueError: if there is no chat template, or it cannot make a prompt of these messages.
    """
    check_chat(processor)
    try:
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
    except (TypeError, TemplateError) as error:
        raise ValueError(
            "processor: expected one whose chat template takes messages of images and texts, got "
            f"{type(processor).__name__}, which fails on them: {one_line(error)}"
        ) from error
    return dict(inputs)


def open_image(path: str | Path) -> Any:
    """The PIL image of a file, as transformers opens it: upright, in RGB.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: naming the file, if it is no image or a broken one.
    """
    from PIL import Image, ImageOps

    with open(path, "rb") as file:
        try:
            return ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        except MemoryError:
            raise
        # Decoders raise errors of all kinds on broken files.
        except Exception as error:
            raise ValueError(
                f"{path}: expected an image, got a file that cannot be read as one: {one_line(error)}"
            ) from error


def image_prompt(processor: Any, images: Sequence[Any], question: str = "") -> dict[str, Any]:
    """What a processor returns for one message of images followed by a question.

    `VoCo.split` cuts it into the context, which is the same whatever is asked, and the text after the images, which is
    the same whatever they are: `blank` can stand for them.

    Args:
        processor: as in `chat_prompt`.
        images: PIL images, or the paths of their files, as in `open_image`.
        question: no text if empty.
    """
    content: list[dict[str, Any]] = [
        {"type": "image", "image": open_image(image) if isinstance(image, str | Path) else image} for image in images
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
