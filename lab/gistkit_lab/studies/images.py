"""Images for studies: scikit-learn's digits, Fashion-MNIST, a folder of IDX files or of classes.

A folder in ImageNet's layout, `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`, is decoded when it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Of ImageNet's channels, as every published recipe has them.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FASHION = Path("/usr/share/datasets/fashion-mnist")
PARTS = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
# Sides of crops differ by at most this factor, as in the papers' recipes.
STRETCH = 4 / 3
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
# What a test's square takes of an image's shorter side (DeiT: resized to 256, cropped to 224).
CENTRE = 224 / 256
# Sizes of so many images tell how large the images of a set are, at most so large.
SAMPLE, LARGEST = 100, 224


class Files:
    """Image files, as a column of a `Split`: a part of them is one too, and pixels are bytes [n, 3, size, size]."""

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


@dataclass(frozen=True, eq=False)
class Split:
    """Images with their classes: uint8 [n, height, width(, channels)] or `Files`, and labels, int64 [n]."""

    images: Any
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> Split:
        return Split(self.images[index], self.labels[index])


@dataclass(frozen=True, eq=False)
class Images:
    """An image set.

    Args:
        name: where it comes from.
        train: to train on.
        held_out: what choices are made by, a part of what the set gives for training.
        test: read once, at the end.
        mean, deviation: of each channel, of training images as numbers from 0 to 1.
        digest: first 12 hexadecimal digits of a SHA-256 of labels and a part of the images, to tell sets apart.
        workers: processes that read and change training images of files while others train; 0: none but the training's.
    """

    name: str
    train: Split
    held_out: Split
    test: Split
    mean: Tensor
    deviation: Tensor
    digest: str
    workers: int = 0

    @property
    def channels(self) -> int:
        """1 for grey images."""
        return len(self.mean)

    @property
    def classes(self) -> int:
        return int(self.train.labels.max()) + 1

    @property
    def side(self) -> int:
        """Pixels of the longest side of training images."""
        images = self.train.images
        return images.side if isinstance(images, Files) else max(images.shape[1:3])

    @property
    def blank(self) -> Tensor:
        """[channels]: a black pixel as `standard` has it."""
        return -self.mean / self.deviation

    def standard(self, images: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """float32 [n, channels, height, width] of stored images, each channel of mean 0 and deviation 1."""
        planes = images.to(device).unsqueeze(-1) if images.dim() == 3 else images.to(device)
        planes = planes.movedim(-1, 1).float() / 255
        shape = (-1, 1, 1)
        return (planes - self.mean.to(device).view(shape)) / self.deviation.to(device).view(shape)

    def squares(self, images: Tensor | Files, size: int, device: torch.device | str = "cpu") -> Tensor:
        """A split's images as `standard`, at `size` pixels a side: whole, or of files the middle square."""
        if isinstance(images, Files):
            return self.standard(images.squares(size).movedim(1, -1), device)
        return resize(self.standard(images, device), size)


def load_images(data: str | Path = "digits") -> Images:
    """An image set.

    Args:
        data: "digits", the 1797 digits of 8 x 8 pixels that come with scikit-learn; "fashion-mnist", 70,000 pictures
            of clothes of 28 x 28 pixels from Debian's package; a folder in ImageNet's layout, `train/CLASS/*.JPEG` and
            `val/CLASS/*.JPEG`, whose files are decoded when they are read; or a folder of IDX files with MNIST's names,
            plain or .gz, bytes [n, height, width] or [n, height, width, channels].
    """
    if str(data) == "digits":
        return _digits()
    if (Path(data) / "train").is_dir():
        return _folder(Path(data))
    folder = FASHION if str(data) == "fashion-mnist" else Path(data)
    if not folder.is_dir():
        if folder == FASHION:
            raise FileNotFoundError(
                f"data: expected Fashion-MNIST in {FASHION}; on Debian and Ubuntu `apt install dataset-fashion-mnist` "
                f"puts it there, elsewhere give a folder with the four files {', '.join(PARTS.values())}[.gz]"
            )
        raise FileNotFoundError(
            f"data: expected digits, fashion-mnist or a folder of IDX files or of train and val, got {str(data)!r}"
        )
    arrays = {part: torch.from_numpy(_read_idx(folder, name)) for part, name in PARTS.items()}
    splits = {}
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if images.dim() not in (3, 4) or labels.dim() != 1 or len(images) != len(labels):
            raise ValueError(
                f"data: expected {split} images [n, height, width(, channels)] and labels [n] in {folder}, got shapes "
                f"{tuple(images.shape)} and {tuple(labels.shape)}"
            )
        splits[split] = Split(images, labels.long())
    if splits["train"].images.shape[1:] != splits["test"].images.shape[1:]:
        raise ValueError(f"data: expected training and test images of one size in {folder}")
    name = "Fashion-MNIST" if folder == FASHION else folder.name
    return _images(name, splits["train"], splits["test"], held_out=min(5000, len(splits["train"]) // 6))


def random_crops(images: Tensor, size: int, least: float, generator: torch.Generator, *, flip: bool = False) -> Tensor:
    """A random crop of each image, [n, channels, height, width], at the size of training: things come in many scales.

    `least` is the least share of an image's area that is kept, above 0 and at most 1; 1: all of it.
    """
    count = len(images)
    draws = torch.rand(5, count, generator=generator)
    side = (least + (1 - least) * draws[0]).sqrt()
    stretch = torch.exp((draws[1] - 0.5) * math.log(STRETCH) * (least < 1))
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    maps = torch.zeros(count, 2, 3)
    maps[:, 0, 0], maps[:, 1, 1] = width, height
    maps[:, 0, 2], maps[:, 1, 2] = (2 * draws[2] - 1) * (1 - width), (2 * draws[3] - 1) * (1 - height)
    if flip:
        maps[:, 0, 0] *= 1 - 2 * (draws[4] < 0.5)
    grid = F.affine_grid(maps.to(images), [count, images.shape[1], size, size], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def resize(images: Tensor, size: int) -> Tensor:
    """Images [n, channels, height, width] as squares of `size` pixels; bilinear, and averaged where they shrink."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)


def on_canvas(images: Tensor, size: int, corners: Tensor, blank: Tensor) -> Tensor:
    """Images [n, channels, side, side] that keep their size, each somewhere on a canvas [n, channels, size, size].

    `corners` int64 [n, 2] are the row and the column of each image's first pixel, `blank` [channels] the pixels around.
    """
    count, channels, side, _ = images.shape
    canvas = blank.to(images).view(1, -1, 1, 1).expand(count, channels, size, size).clone()
    rows, columns = (
        corners[:, axis, None].to(images.device) + torch.arange(side, device=images.device) for axis in (0, 1)
    )
    each = torch.arange(count, device=images.device).view(-1, 1, 1)
    canvas[each, :, rows[:, :, None], columns[:, None, :]] = images.movedim(1, -1)
    return canvas


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits need scikit-learn, which is missing: pip install './lab[digits]'") from error
    data = load_digits()
    # Sixteen shades; writers come one after the other, so that an order by chance mixes them.
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(7))
    images = torch.from_numpy(np.rint(data.images * (255 / 16)).astype(np.uint8))[order]
    labels = torch.from_numpy(data.target).long()[order]
    all_images = Split(images, labels)
    return _images("scikit-learn's digits", all_images[:1447], all_images[1447:], held_out=350)


def _folder(folder: Path) -> Images:
    """Images in ImageNet's layout; `val` is the test, and every so many training images are held out."""
    splits = class_folders(folder)
    shuffled = torch.Generator().manual_seed(7)
    train, test = (Split(*splits[name]) for name in ("train", "val"))
    # At even distances, so that each class gives some; then in a mixed order, of which evaluations take the first.
    apart = max(6, math.ceil(len(train) / 10_000))
    is_held_out = torch.arange(len(train)) % apart == apart - 1
    if len(train) < apart:
        raise ValueError(f"data: expected at least {apart} training images in {folder}, got {len(train)}")
    held_out = train[is_held_out.nonzero()[:, 0]]
    held_out, test = (split[torch.randperm(len(split), generator=shuffled)] for split in (held_out, test))
    mean, deviation = map(torch.tensor, IMAGENET)
    return Images(
        folder.name, train[(~is_held_out).nonzero()[:, 0]], held_out, test, mean, deviation, digest(folder, splits)
    )


def class_folders(folder: Path) -> dict[str, tuple[Files, Tensor]]:
    """{"train", "val"}: files and the classes of each, int64, the folders of `train` in the order of names."""
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


def _images(name: str, train: Split, test: Split, held_out: int) -> Images:
    cut = len(train) - held_out
    train_split = train[:cut]
    sample = train_split.images[:10_000].double() / 255
    sample = sample.unsqueeze(-1) if sample.dim() == 3 else sample
    mean, deviation = sample.mean((0, 1, 2)).float(), sample.std((0, 1, 2)).clamp(min=1e-3).float()
    digest = hashlib.sha256()
    for split in (train, test):
        digest.update(split.labels.numpy().tobytes())
        digest.update(split.images[:1000].contiguous().numpy().tobytes())
    return Images(name, train_split, train[cut:], test, mean, deviation, digest.hexdigest()[:12])


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """The bytes of an IDX file, plain ones as they lie on the disk."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        # An empty file cannot be mapped.
        raw: np.ndarray = np.memmap(plain, np.uint8, "c") if plain.stat().st_size else np.empty(0, np.uint8)
    elif packed.exists():
        raw = np.frombuffer(bytearray(gzip.decompress(packed.read_bytes())), np.uint8)
    else:
        raise FileNotFoundError(f"data: expected {plain} or {packed.name} beside it, found neither")
    axes = int(raw[3]) if len(raw) >= 4 else 0
    start = 4 + 4 * axes
    # Two bytes of 0, 8 for unsigned bytes, and the number of axes.
    if bytes(raw[:3]) != b"\0\0\x08" or not axes or len(raw) < start:
        raise ValueError(f"data: expected an IDX file of unsigned bytes, got another header in {folder / name}")
    shape = tuple(int(size) for size in np.frombuffer(bytes(raw[4:start]), ">u4"))
    if len(raw) - start != math.prod(shape):
        raise ValueError(
            f"data: expected {math.prod(shape)} bytes for the shape {shape} of {folder / name}, got {len(raw) - start}"
        )
    return raw[start:].reshape(shape)
