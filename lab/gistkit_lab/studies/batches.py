"""What training batches of images are made of, the same whatever the number of processes that read the images."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gistkit_lab.studies.draws import generator_of
from gistkit_lab.studies.images import Files


def transforms() -> Any:
    """torchvision's transforms; an ImportError where it is missing, or was built for another torch."""
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


class Draws(NamedTuple):
    """The random numbers of each step of a run: so many images of those that there are."""

    seed: int
    batch: int
    images: int

    def rows(self, step: int) -> tuple[Tensor, torch.Generator]:
        """The images of a step, int64 [batch], and what the rest of the step is drawn from."""
        generator = generator_of(self.seed, step)
        return torch.randint(0, self.images, (self.batch,), generator=generator), generator

    def seeds(self, step: int) -> Tensor:
        """int64 [4, batch]: of each image's crop, of its operations, of what is erased of it, and of mixtures."""
        return torch.randint(1 << 62, (4, self.batch), generator=generator_of(self.seed, step, 1))


@dataclass(frozen=True, eq=False)
class FileCrops(Dataset[Tensor]):
    """Crops of image files by step, uint8 [n, 3, size, size], changed by `augment`.

    `wanted` are the places of a step's batch to make, int64 [n]; size, least and flip are those of `Files.crops`.
    """

    files: Files
    draws: Draws
    wanted: Tensor
    size: int
    least: float
    flip: bool
    augment: Augment | None

    def __getitem__(self, step: int) -> Tensor:
        rows, seeds = self.draws.rows(step)[0][self.wanted], self.draws.seeds(step)[:, self.wanted]
        pixels = self.files[rows].crops(self.size, self.least, seeds[0], flip=self.flip)
        return pixels if self.augment is None else self.augment.images(pixels, seeds[1])


class Ahead:
    """The items of a dataset of steps, made by other processes before they are asked for, while steps come in order.

    What a step gives depends on the step alone; nothing is made ahead from `steps` on, and without `workers`.
    """

    def __init__(self, dataset: Dataset[Tensor], steps: int, workers: int) -> None:
        self.dataset, self.steps, self.workers = dataset, steps, workers
        self._next = -1

    def __call__(self, step: int) -> Tensor:
        if step != self._next or step >= self.steps:
            self._items = self._from(step)
        self._next = step + 1
        return next(self._items)

    def _from(self, step: int) -> Iterator[Tensor]:
        places: Any = range(step, max(self.steps, step + 1))
        # An item is a whole batch: several processes make several of them at a time.
        loader = DataLoader(
            self.dataset, sampler=places, batch_size=None, num_workers=self.workers, worker_init_fn=_ignore_interrupt
        )  # fmt: skip
        return iter(loader)


def _ignore_interrupt(worker: int) -> None:
    """Ctrl-C reaches all processes; the one that trains ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
