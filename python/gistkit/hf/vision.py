"""Vision: images in the sequence of a vision-language model, as its own processor and modules make them.

A row of `FAMILIES` is all that a family needs: its features enter the text's sequence instead of the image tokens that
its processor writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from gistkit.common.messages import one_line
from gistkit.hf.attach import pretrained


@dataclass(frozen=True)
class VisionFamily:
    """How the models of one type take images.

    Args:
        tower, projector: names of the vision tower and of what maps its output to embeddings, inside the base model.
        dims: dimensions that pixel_values may have.
        needed, optional: what the processor gives beside pixel_values, and the model takes with them.
        tiles: features come by rows of the batch; each run of image tokens is an image, or a tile of one.
        bidirectional: the image tokens of one image see each other.
        axes: the model has position IDs of its own with so many axes; 1: it counts tokens.
    """

    tower: str
    projector: str
    dims: tuple[int, ...]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    tiles: bool = False
    bidirectional: bool = False
    axes: int = 1


_LLAVA = ("vision_tower", "multi_modal_projector")
_IDEFICS3 = VisionFamily("vision_model", "connector", (5,), optional=("pixel_attention_mask",), tiles=True)
_QWEN2_VL = VisionFamily("visual", "visual.merger", (2,), needed=("image_grid_thw",), axes=3)
# By `model_type` of the configuration.
FAMILIES = {
    "llava": VisionFamily(*_LLAVA, dims=(4,)),
    "llava_next": VisionFamily(*_LLAVA, dims=(4, 5), needed=("image_sizes",)),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "gemma3": VisionFamily(*_LLAVA, dims=(4,), bidirectional=True),
}
PIXELS = "pixel_values"
# Inputs of processors that mark images for the text model, as image tokens do already.
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


class Vision:
    """The images of a vision-language model: what it reads, their features and position IDs.

    Args:
        model: a transformers model of a type in `FAMILIES`, with its language model head, or a module with one in it.

    Raises:
        TypeError: for other models, by their name.
    """

    def __init__(self, model: nn.Module) -> None:
        language_model = pretrained(model)
        self.config: Any = language_model.config
        self.name: str = self.config.model_type
        family = FAMILIES.get(self.name)
        base: Any = language_model.base_model
        if family is None or not hasattr(base, "get_image_features"):
            raise TypeError(
                f"model: expected a vision-language model of type {', '.join(FAMILIES)}, whose image features stand in "
                f"the text's sequence, got {type(language_model).__name__} of type {self.name}"
            )
        tower_type = self.config.vision_config.model_type
        if tower_type == "pixtral":
            raise TypeError(
                "model: expected a vision tower whose images are one run of image tokens, got "
                f"{type(language_model).__name__} with a {tower_type} tower, which has a run for each row of patches"
            )
        self.family, self._base = family, base
        self.image_token: int = self.config.image_token_id

    @property
    def names(self) -> set[str]:
        """What a processor gives for images."""
        return {PIXELS, *self.family.needed, *self.family.optional}

    @property
    def tower(self) -> nn.Module:
        """The vision tower; some hold their projector."""
        return cast(nn.Module, self._base.get_submodule(self.family.tower))

    @property
    def projector(self) -> nn.Module:
        """What maps the tower's output to embeddings."""
        return cast(nn.Module, self._base.get_submodule(self.family.projector))

    def projector_weights(self) -> Iterator[nn.Parameter]:
        """The weights of the projector, and others that stand in the sequence, such as LLaVA-NeXT's end of a line."""
        yield from self.projector.parameters()
        yield from self._base.parameters(recurse=False)

    def pixels(self, inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """pixel_values and what belongs to them in a processor's output, on `device`, pixels in `dtype`; checked.

        Raises:
            ValueError: if they are not what this model's processor gives.
        """
        family = self.family
        names = self.names
        expected = f"expected the output of the {self.name} model's own processor"
        others = sorted(name for name, value in inputs.items() if name not in names | _TEXT and value is not None)
        if others:
            raise ValueError(f"{others[0]}: {expected}, with {', '.join(sorted(names))} beside the text, got one more")
        missing = [name for name in (PIXELS, *family.needed) if inputs.get(name) is None]
        if missing:
            raise ValueError(f"{missing[0]}: {expected} for texts with images, got none")
        found = {name: torch.as_tensor(inputs[name]).to(device) for name in names if inputs.get(name) is not None}
        values = found[PIXELS]
        if values.dim() not in family.dims or not values.is_floating_point():
            dims = " or ".join(map(str, family.dims))
            raise ValueError(
                f"{PIXELS}: {expected}, floating-point values of {dims} dimensions, got {values.dtype} of shape "
                f"{tuple(values.shape)}"
            )
        return found | {PIXELS: values.to(dtype)}

    def features(self, pixels: Mapping[str, Tensor]) -> list[Tensor]:
        """Features [n, d] of each image in order, or of each row's images in families with tiles.

        Raises:
            ValueError: if the tower cannot read the pixels, such as those of another model's processor.
        """
        try:
            found = self._base.get_image_features(**pixels, return_dict=True).pooler_output
        except (RuntimeError, ValueError, IndexError) as error:
            # The second is of torch on CPUs.
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in sorted(pixels.items()))
            raise ValueError(
                f"{PIXELS}: expected images as the {self.name} model's own processor gives them, got {shapes}, on "
                f"which its vision tower fails: {one_line(error)}"
            ) from error
        return list(found)

    def parts(self, is_image: Tensor, features: Sequence[Tensor]) -> list[list[tuple[int, int]]]:
        """[start, end) of the image tokens of each image, or tile, by rows of the batch.

        Args:
            is_image: bool [B, N], the image tokens.
            features: what `features` returned.

        Raises:
            ValueError: if the features do not fit the image tokens.
        """
        runs = [_runs(row) for row in is_image.tolist()]
        tokens, count = int(is_image.sum()), sum(map(len, features))
        if tokens != count:
            raise ValueError(
                f"{PIXELS}: expected images of {tokens} features, as input_ids have {tokens} image tokens (id "
                f"{self.image_token}), got {count} features: are both from one call of the model's own processor?"
            )
        if self.family.tiles:
            by_row = [sum(end - start for start, end in row) for row in runs]
            # Before transformers 5.20 those of each tile, from then on those of each row.
            if not {*accumulate(by_row)} <= {*accumulate(map(len, features))}:
                raise ValueError(
                    f"{PIXELS}: expected {by_row} features in the rows of the batch, as input_ids have image tokens, "
                    f"got {list(map(len, features))}"
                )
            return runs
        sizes = iter(map(len, features))
        parts: list[list[tuple[int, int]]] = []
        for row, row_runs in enumerate(runs):
            parts.append([])
            for start, end in row_runs:
                # Images may follow each other without a token between.
                while start < end:
                    size = next(sizes)
                    if start + size > end:
                        raise ValueError(
                            f"input_ids: expected {size} image tokens in a row for an image, as it has features, got "
                            f"{end - start} in row {row}"
                        )
                    parts[-1].append((start, start + size))
                    start += size
        return parts

    def position_ids(self, is_image: Tensor, valid: Tensor, pixels: Mapping[str, Tensor]) -> Tensor | None:
        """The model's own position IDs [A, B, N] of its tokens; None if it counts them.

        Args:
            is_image, valid: bool [B, N], the image tokens, and all tokens but padding.
            pixels: what `pixels` returned.
        """
        if self.family.axes == 1:
            return None
        grids = pixels["image_grid_thw"]
        runs = sum(len(_runs(row)) for row in is_image.tolist())
        if runs != len(grids):
            raise ValueError(
                f"image_grid_thw: expected a row for each of {runs} runs of image tokens in input_ids, got {len(grids)}"
            )
        ids, _ = self._base.get_rope_index(
            torch.zeros_like(is_image, dtype=torch.int64),
            mm_token_type_ids=is_image.int(),
            image_grid_thw=grids,
            attention_mask=valid.long(),
        )
        return cast(Tensor, ids)


def _runs(row: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of each run of True."""
    edges = [index for index, (a, b) in enumerate(zip([False, *row], [*row, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))
