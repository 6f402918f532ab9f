"""Changes of training images by torchvision: RandAugment, mixup, CutMix and random erasing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def transforms() -> Any:
    """torchvision's transforms.

    Raises:
        ImportError: if it is missing, or was built for another torch.
    """
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "rand_augment, mixup, cutmix and erasing need torchvision, built for this torch: pip install "
            "'gistkit[images]'; beside torch for the CPU alone, torchvision for the CPU alone"
        ) from error
    return v2


class Augment:
    """RandAugment of each image, and mixtures of the images of a batch with their labels.

    Args:
        classes: of the labels.
        rand_augment: magnitude of two operations an image, of 31 steps; 0: none (arXiv 1909.13719).
        mixup, cutmix: alpha, 0: none; with both, one of them is chosen for each batch (arXiv 1710.09412, 1905.04899).
        erasing: share of the images that a rectangle is erased of (arXiv 1708.04896).

    Raises:
        ImportError: torchvision is needed, and missing or built for another torch.
        ValueError: an argument out of range.
    """

    def __init__(
        self, classes: int, *, rand_augment: int = 0, mixup: float = 0.0, cutmix: float = 0.0, erasing: float = 0.0
    ) -> None:
        check(rand_augment, mixup, cutmix, erasing)
        v2 = transforms()
        self._each = v2.RandAugment(num_ops=2, magnitude=rand_augment) if rand_augment else None
        kinds = ((v2.MixUp, mixup), (v2.CutMix, cutmix))
        # Both need two classes at least.
        mixtures = [kind(alpha=alpha, num_classes=max(classes, 2)) for kind, alpha in kinds if alpha]
        self._mixtures = v2.RandomChoice(mixtures) if mixtures else None
        self._erasing = v2.RandomErasing(p=erasing) if erasing else None

    def images(self, images: Tensor, seeds: Tensor) -> Tensor:
        """uint8 [n, channels, height, width] on the CPU to the same; what an image becomes is up to its seed, [n]."""
        return images if self._each is None else _one_by_one(self._each, images, seeds)

    def batch(self, pixels: Tensor, labels: Tensor, seed: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised pixels [B, channels, height, width] and int64 labels [B]; of mixtures float [B, classes].

        Args:
            seed: of the mixture, in which an image meets the one before it.
            seeds: of what is erased of each image, [B].
        """
        if self._mixtures is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                pixels, labels = self._mixtures(pixels, labels)
        return pixels if self._erasing is None else _one_by_one(self._erasing, pixels, seeds), labels


def _one_by_one(change: Callable[[Tensor], Tensor], images: Tensor, seeds: Tensor) -> Tensor:
    """Each image changed by torchvision, whose transforms draw torch's own random numbers."""
    changed = []
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(images, seeds.tolist(), strict=True):
            torch.manual_seed(seed)
            changed.append(change(image))
    return torch.stack(changed)


def check(rand_augment: int, mixup: float, cutmix: float, erasing: float) -> None:
    """Raises a ValueError for an argument of `Augment` that is out of range."""
    if not 0 <= rand_augment <= 30:
        raise ValueError(f"rand_augment: expected a magnitude from 0 to 30, got {rand_augment}")
    for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
        if not alpha >= 0:
            raise ValueError(f"{name}: expected an alpha of at least 0, got {alpha}")
    if not 0 <= erasing <= 1:
        raise ValueError(f"erasing: expected a share from 0 to 1, got {erasing}")
