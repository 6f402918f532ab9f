"""What training batches of images are made of, the same whatever the number of processes that read the images."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gistkit_lab.studies.resolution.augment import Augment
from gistkit_lab.studies.resolution.folders import Files


class Draws(NamedTuple):
    """The random numbers of each step.

    Args:
        seed: of the run.
        batch: images a step.
        images: to choose from.
    """

    seed: int
    batch: int
    images: int

    def rows(self, step: int) -> tuple[Tensor, torch.Generator]:
        """The images of a step, int64 [batch], and what the rest of the step is drawn from."""
        generator = torch.Generator().manual_seed(100_003 * (self.seed + 1) + step)
        return torch.randint(0, self.images, (self.batch,), generator=generator), generator

    def seeds(self, step: int) -> Tensor:
        """int64 [4, batch]: of each image's crop, of its operations, of what is erased of it, and of mixtures."""
        generator = torch.Generator().manual_seed((1 << 40) + 100_003 * (self.seed + 1) + step)
        return torch.randint(1 << 62, (4, self.batch), generator=generator)


@dataclass(frozen=True, eq=False)
class FileCrops(Dataset[Tensor]):
    """Crops of image files by step, uint8 [n, 3, size, size].

    Args:
        files: to choose from.
        draws: of the run.
        wanted: the places of a step's batch to make, int64 [n].
        size, least, flip: of `Files.crops`.
        augment: changes the bytes of each crop.
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

    Args:
        dataset: what a step gives depends on the step alone.
        steps: nothing is made ahead from this one on.
        workers: processes; 0: each item is made here when it is asked for.
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
