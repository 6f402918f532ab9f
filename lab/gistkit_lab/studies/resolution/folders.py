"""Folders of images in ImageNet's layout, `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`, which are decoded when read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
# What a test's square takes of an image's shorter side (DeiT: resized to 256, cropped to 224).
CENTRE = 224 / 256
# Sides of crops differ by at most this factor.
STRETCH = 4 / 3
# Sizes of so many images tell how large the images of a set are, at most so large.
SAMPLE, LARGEST = 100, 224


class Files:
    """Image files, as a column of a `Split`: a part of them is one too, and pixels are bytes [n, 3, size, size].

    Args:
        paths: of the files, [n].
    """

    def __init__(self, paths: np.ndarray) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Tensor | slice) -> Files:
        return Files(self.paths[index if isinstance(index, slice) else index.numpy()])

    @property
    def side(self) -> int:
        """The longest side of the first images, at most 224."""
        sides = [max(image.size) for image in map(_opened, self.paths[:SAMPLE])]
        return min(LARGEST, max(sides))

    def crops(self, size: int, least: float, seeds: Tensor, *, flip: bool = False) -> Tensor:
        """A random crop of each by its seed [n], with an area of `least` to all of the image's and sides 3:4 to 4:3."""
        draws = [torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds.tolist()]

        def crop(image: Any, index: int) -> np.ndarray:
            area, ratio, right, down, mirrored = draws[index]
            stretch = math.exp((2 * ratio - 1) * math.log(STRETCH) / 2)
            side = math.sqrt((least + (1 - least) * area) * image.width * image.height)
            width, height = min(side * stretch, image.width), min(side / stretch, image.height)
            left, top = right * (image.width - width), down * (image.height - height)
            pixels = _resized(image, size, (left, top, left + width, top + height))
            return pixels[:, ::-1] if flip and mirrored < 0.5 else pixels

        return self._decoded(crop)

    def squares(self, size: int) -> Tensor:
        """The middle of each, 7/8 of its shorter side."""

        def centre(image: Any, _: int) -> np.ndarray:
            side = CENTRE * min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            return _resized(image, size, (left, top, left + side, top + side))

        return self._decoded(centre)

    def _decoded(self, change: Callable[[Any, int], np.ndarray]) -> Tensor:
        def one(index: int) -> np.ndarray:
            path = self.paths[index]
            try:
                return change(_opened(path).convert("RGB"), index)
            except (OSError, SyntaxError) as error:
                raise ValueError(f"data: expected an image in {path}, got a file that cannot be read") from error

        # Pillow decodes without Python's lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            pixels = list(pool.map(one, range(len(self))))
        return torch.from_numpy(np.stack(pixels)).movedim(-1, 1)


def class_folders(folder: Path) -> dict[str, tuple[Files, Tensor]]:
    """{"train", "val"}: files and the classes of each, int64, which are the folders of `train` in the order of names.

    Raises:
        ValueError: a split without folders of classes, a class without an image, or one that `train` lacks.
    """
    classes = [path.name for path in _folders(folder / "train")]
    splits = {}
    for split in ("train", "val"):
        paths: list[str] = []
        labels: list[int] = []
        for path in _folders(folder / split):
            if path.name not in classes:
                raise ValueError(f"data: expected the classes of {folder / 'train'}, got {path}")
            found = sorted(str(file) for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
            if not found:
                raise ValueError(f"data: expected images ({', '.join(SUFFIXES)}) in {path}, found none")
            paths += found
            labels += [classes.index(path.name)] * len(found)
        splits[split] = Files(np.array(paths, object)), torch.tensor(labels)
    return splits


def digest(folder: Path, splits: dict[str, tuple[Files, Tensor]]) -> str:
    """As of `Images`, of the files' names and the classes: not of what is in them."""
    names = hashlib.sha256()
    for files, labels in splits.values():
        for path in files.paths:
            names.update(f"{Path(path).relative_to(folder)}\n".encode())
        names.update(labels.numpy().tobytes())
    return names.hexdigest()[:12]


def _folders(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not found:
        raise ValueError(f"data: expected a folder for each class in {folder}, as ImageNet's layout has, found none")
    return found


def _opened(path: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("folders of images need Pillow, which is missing: pip install 'gistkit[images]'") from error
    return Image.open(path)


def _resized(image: Any, size: int, box: tuple[float, float, float, float]) -> np.ndarray:
    """uint8 [size, size, 3] of a part of an image; bicubic, and averaged where it shrinks."""
    from PIL.Image import Resampling

    return np.asarray(image.resize((size, size), Resampling.BICUBIC, box=box))
