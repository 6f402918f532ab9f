"""Readers: the vision-language model of an arm, which answers questions from what the arm leaves of an image."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d
from transformers import LlavaForConditionalGeneration

from gistkit.compress import VoCo
from gistkit.hf.vision import Vision
from gistkit.layouts.positions import SCHEMES
from gistkit_lab.studies.voco.mosaics import TURN
from gistkit_lab.studies.voco.study import Arm, Recipe
from gistkit_lab.studies.voco.words import Words


class Reader(ABC):
    """Answers questions about mosaics.

    Args:
        model: the vision-language model.
    """

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        self.model = model

    @abstractmethod
    def answers(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Logits [B, Q, V] of the answers in texts [B, 4 Q] about mosaics, by questions and answers before."""

    @abstractmethod
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that train, by name."""


class Plain(Reader):
    """The model itself, with all vision tokens, their means, or none.

    Args:
        model: the vision-language model.
        tokens: read of an image: as many as it has vision tokens, fewer, or 0.
    """

    def __init__(self, model: LlavaForConditionalGeneration, tokens: int) -> None:
        super().__init__(model)
        self.tokens, self.vision = tokens, Vision(model)

    def answers(self, pixels: Tensor, text: Tensor) -> Tensor:
        embed = self.model.get_input_embeddings()
        parts = [embed(text.new_full((len(text), 1), Words.BOS))]
        if self.tokens:
            parts.append(means(torch.stack(self.vision.features({"pixel_values": pixels})), self.tokens))
        embedded = torch.cat([*parts, embed(text)], 1)
        logits: Tensor = self.model(inputs_embeds=embedded, use_cache=False).logits
        return logits[:, self.tokens + TURN - 1 :: TURN]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]


class Compressed(Reader):
    """VoCo around the model: questions are answered from the keys and values of its tokens."""

    def __init__(self, model: LlavaForConditionalGeneration, layout: str, tokens: int) -> None:
        super().__init__(model)
        self.compressor = VoCo(
            model, memory_tokens=tokens, layout=layout, lora=None, train_projector=True, losses=("lm",)
        )  # fmt: skip

    def context(self, pixels: Tensor) -> dict[str, Tensor]:
        """What a processor would make of mosaics: [BOS][image]."""
        ids = torch.full((len(pixels), 1 + self.model.config.image_seq_length), Words.IMAGE, device=pixels.device)
        ids[:, 0] = Words.BOS
        return {"input_ids": ids, "pixel_values": pixels}

    def answers(self, pixels: Tensor, text: Tensor) -> Tensor:
        # Not `encode`, whose memories are made to be kept.
        memory, _, _ = self.compressor.compress_rows(self.compressor.contexts(self.context(pixels)))
        return self.compressor.logits(self.compressor.decode(memory, "lm", text)[:, TURN - 1 :: TURN])

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.compressor.trainable())


def means(features: Tensor, tokens: int) -> Tensor:
    """Means [B, tokens, d] of features [B, N, d] of a square grid, over windows as near to squares as they can be."""
    side = math.isqrt(features.shape[1])
    if tokens == side**2:
        return features
    rows = max(count for count in range(1, math.isqrt(tokens) + 1) if tokens % count == 0)
    grid = features.unflatten(1, (side, side)).movedim(-1, 1)
    return adaptive_avg_pool2d(grid, (rows, tokens // rows)).flatten(2).movedim(1, -1)


def build_reader(recipe: Recipe, arm: Arm, model: LlavaForConditionalGeneration) -> Reader:
    """The reader of an arm, around a model whose vision tower it freezes."""
    tokens = arm.tokens(recipe)
    if arm.method in SCHEMES:
        return Compressed(model, arm.method, tokens)
    reader = Plain(model, tokens)
    projector = set(reader.vision.projector_weights())
    for weight in {*reader.vision.tower.parameters()} - projector:
        weight.requires_grad_(False)
    return reader
