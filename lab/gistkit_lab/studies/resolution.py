"""Study `resolution`: image classifiers that are trained at one size and tested at larger ones, by position encoding.

Images are resized and patches are not, so that the grid of patches grows. All arms have the same model, steps, batches
and test images (SeqPE: Transformer with Sequential Position Encoding, Section 4.3 and Table III; there the model is
ViT-S on ImageNet-1k). The preset `canvas` is not the paper's: there images keep their size, and stand anywhere on a
canvas that grows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.common.files import write_picture
from gistkit.common.processes import launched
from gistkit.nn import (
    IMAGE_ENCODINGS,
    Learned2D,
    PositionEncoding,
    SeqPEPositions,
    grid_positions,
    position_encoding,
)
from gistkit.options.arguments import whole
from gistkit.train import checkpoints
from gistkit_lab.studies import batches
from gistkit_lab.studies.batches import Ahead, Draws, FileCrops
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.images import Files, Images, Split, load_images, on_canvas, random_crops
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.positions import (
    Learner,
    Panel,
    PositionRecipe,
    PositionStudy,
    Run,
    draw_lengths,
    finished,
    load_part,
    without_losses,
)
from gistkit_lab.studies.rows import Rows
from gistkit_lab.studies.runner import cores
from gistkit_lab.studies.study import Pictures, SavedRun, StudyPlan
from gistkit_lab.vit import ViT

# Arms that train SeqPE without one of its losses, or without both.
ABLATIONS = without_losses("seqpe-mul")
ARMS = (*IMAGE_ENCODINGS, *ABLATIONS)


@dataclass(frozen=True)
class Recipe(PositionRecipe):
    """Everything that determines a run except its arm, its seed and the images.

    Args:
        grids: patches on a side, first in training and then in tests, ascending.
        patch: pixels on a side of a patch; 0: so that the images of training are at least as large as the set's.
        object_grid: patches on a side of an image that stands anywhere on a blank canvas of `grids`; 0: images fill it.
        crop: of `random_crops`, the least share of an image that a crop keeps.
        flip: mirrors half of the training images.
        smoothing: of labels.
        rand_augment, mixup, cutmix, erasing: of `Augment`, which needs torchvision.
        drop_path: of `ViT`.
        sinusoid_scale: of `Sinusoidal`.
        learned_std: of `Learned2D`.
        eval_images: held-out images at every evaluation.
        test_images: of each split at the end, at most.
    """

    steps: int = 1500
    batch: int = 48
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    eval_every: int = 500
    final: float = 0.01
    dim: int = 64
    layers: int = 3
    heads: int = 4
    max_position: int = 40
    digits: int = 2
    pivots: int = 16
    candidates: int = 16
    windows: int = 8
    grids: tuple[int, ...] = (8, 10, 12, 16, 24)
    patch: int = 0
    object_grid: int = 0
    crop: float = 0.1
    flip: bool = False
    smoothing: float = 0.0
    rand_augment: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    drop_path: float = 0.0
    sinusoid_scale: float = 1.0
    learned_std: float = 0.02
    eval_images: int = 100
    test_images: int = 500

    def __post_init__(self) -> None:
        if not self.grids or list(self.grids) != sorted(set(self.grids)) or self.grids[0] < 1:
            raise ValueError(f"grids: expected ascending sizes of at least 1, got {self.grids}")
        if self.grids[-1] > min(self.max_position, self.base**self.digits):
            raise ValueError(
                f"grids: expected at most {min(self.max_position, self.base**self.digits)} patches on a side, "
                f"got {self.grids[-1]}"
            )
        if not 0 <= self.object_grid <= self.grids[0]:
            raise ValueError(
                f"object_grid: expected at most {self.grids[0]} patches on a side, those of training, or 0, got "
                f"{self.object_grid}"
            )
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop: expected above 0 and at most 1, got {self.crop}")
        batches.check(self.rand_augment, self.mixup, self.cutmix, self.erasing)

    @property
    def size(self) -> int:
        """Pixels on a side of training images."""
        return self.grids[0] * self.patch

    def image_size(self, grid: int) -> int:
        """Pixels on a side of an image in a grid of so many patches."""
        return (self.object_grid or grid) * self.patch

    def fitted(self, images: Images) -> Recipe:
        """With a patch for these images, where there is none."""
        if self.patch:
            return self
        # A patch of one pixel would show nothing of edges.
        return replace(self, patch=max(2, math.ceil(images.side / (self.object_grid or self.grids[0]))))

    def augment(self, classes: int) -> batches.Augment | None:
        """What changes training images; None: nothing does."""
        if not (self.rand_augment or self.mixup or self.cutmix or self.erasing):
            return None
        return batches.Augment(
            classes, rand_augment=self.rand_augment, mixup=self.mixup, cutmix=self.cutmix, erasing=self.erasing
        )


PRESETS = {
    # Seconds a run.
    "quick": Recipe(
        steps=300, warmup=30, eval_every=300, layers=2, max_position=20, grids=(4, 5, 6, 8, 12), window_positions=16,
        test_images=200,
    ),
    # A few minutes a run.
    "short": Recipe(),
    # A minute a run; images keep their size on a larger canvas.
    "canvas": Recipe(
        steps=1000, warmup=50, layers=2, max_position=20, grids=(6, 8, 9, 12, 18), window_positions=16,
        object_grid=4, crop=1.0,
    ),
    # Section 4.3, for a GPU.
    "seqpe-imagenet": Recipe(
        steps=500_000, batch=1024, learning_rate=1e-3, warmup=6250, weight_decay=0.05, clip=5.0, beta_2=0.999,
        eval_every=5000, dim=384, layers=12, heads=6, max_position=100, base=10, digits=2, encoder_layers=2,
        encoder_heads=6, encoder_dropout=0.1, bfloat16=True, pivots=32, candidates=32, windows=32, window_positions=32,
        contrastive_weight=0.1, ood_weight=0.1, shift_rate=0.1, mul_start=0.0, position_std=0.4,
        grids=(14, 20, 24, 28, 32, 40, 42), patch=16, crop=0.08, flip=True, smoothing=0.1, rand_augment=9, mixup=0.8,
        cutmix=1.0, erasing=0.25, drop_path=0.1, eval_images=2000, test_images=50_000,
    ),
}  # fmt: skip

# By preset, what it follows and what its paper leaves open.
NOTES = {
    "seqpe-imagenet": (
        "Follows SeqPE, Section 4.3 and Appendix A: ViT-S/16 on ImageNet-1k at 224 x 224 pixels, tested at up to "
        "672 x 672; SeqPE with 2 decimal digits an axis and 2 layers without weight decay, both losses weighing 0.1, "
        "32 pivots with 32 candidates, 32 windows of 32 positions, L_max 100 x 100, 10% of images shifted. The paper "
        "takes the rest from DeiT: 1024 images a step, AdamW at 1e-3 with weight decay 0.05 and 5 epochs of warm-up, a "
        "cosine to 1e-5, label smoothing 0.1, mixup 0.8 or CutMix 1.0, RandAugment of magnitude 9, erasing 0.25, drop "
        "path 0.1. It does not say, and its released code has: 400 epochs, gradients clipped to 5, encoder dropout "
        "0.1; that code differs in 1.2e-3 with 20 epochs of warm-up, and in 64 candidates and window positions. Ours: "
        "torchvision's RandAugment always takes one magnitude where DeiT's varies, images are not repeated within a "
        "batch, and 10,000 training images are held out."
    )
}  # fmt: skip


class Classifier(Learner[ViT]):
    """A ViT and its training, all of which but the positions' weights is the same for all arms of a seed."""

    def __init__(self, recipe: Recipe, arm: str, images: Images, seed: int, device: str = "cpu") -> None:
        self.recipe, self.arm, self.images = recipe, arm, images
        self.augment = recipe.augment(images.classes)
        torch.manual_seed(seed)
        position = build_position(recipe, arm)
        torch.manual_seed(seed)
        model = ViT(
            recipe.patch, images.channels, images.classes, recipe.dim, recipe.layers, recipe.heads, position,
            dropout=recipe.dropout, attention_dropout=recipe.attention_dropout, drop_path=recipe.drop_path,
        )  # fmt: skip
        shape = (recipe.grids[0], recipe.grids[0])
        super().__init__(recipe, model, shape, seed, device, **ABLATIONS.get(arm, {}))
        self.draws = Draws(seed, recipe.batch, len(images.train))
        self.wanted, self.kept = torch.arange(recipe.batch), slice(None)
        if self.processes.count > 1:
            # In a mixture an image meets the one before it.
            part = self.part(recipe.batch)
            self.wanted, self.kept = torch.arange(part.start - 1, part.stop) % recipe.batch, slice(1, None)
        self.files: Ahead | None = None
        if isinstance(images.train.images, Files):
            crops = FileCrops(
                images.train.images, self.draws, self.wanted, recipe.image_size(recipe.grids[0]), recipe.crop,
                recipe.flip, self.augment,
            )  # fmt: skip
            self.files = Ahead(crops, recipe.steps, images.workers)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(pixels [n, channels, size, size], labels [n]) of step 0, 1, ..., the same at every call.

        Several processes have a part each. Labels of mixed images are shares of the classes, [n, classes].
        """
        rows, generator = self.draws.rows(step)
        seeds, train, recipe = self.draws.seeds(step), self.images.train, self.recipe
        grid = recipe.grids[0]
        if self.files is not None:
            pixels = self.images.standard(self.files(step).movedim(1, -1), self.device)
        else:
            stored = train.images[rows]
            if self.augment is not None:
                planes = stored[:, None] if stored.dim() == 3 else stored.movedim(-1, 1)
                stored = self.augment.images(planes, seeds[1]).movedim(1, -1)
            stored = self.images.standard(stored, self.device)
            pixels = random_crops(stored, recipe.image_size(grid), recipe.crop, generator, flip=recipe.flip)
            pixels = pixels[self.wanted]
        pixels = self.place_images(pixels, grid, self.corners(len(rows), grid, generator)[self.wanted])
        labels = train.labels[rows[self.wanted]].to(self.device)
        if self.augment is not None:
            pixels, labels = self.augment.batch(pixels, labels, int(seeds[3, 0]), seeds[2, self.wanted])
        return pixels[self.kept], labels[self.kept]

    def corners(self, count: int, grid: int, generator: torch.Generator) -> Tensor:
        """Random places of so many images, in whole patches: int64 [count, 2], row and column of the first pixel."""
        free = grid - (self.recipe.object_grid or grid)
        return self.recipe.patch * torch.randint(0, free + 1, (count, 2), generator=generator)

    def place_images(self, pixels: Tensor, grid: int, corners: Tensor) -> Tensor:
        """Images of their size as a grid of so many patches on a side."""
        if not self.recipe.object_grid:
            return pixels
        return on_canvas(pixels, grid * self.recipe.patch, corners, self.images.blank)

    def loss(self, step: int) -> Tensor:
        """The loss of a step: that of its classes, and SeqPE's two."""
        self.model.train()
        pixels, labels = self.batch(step)
        positions, embeddings, loss = self.place(self.recipe.batch, step)
        with self.precision():
            logits = self.model(pixels, positions, embeddings=embeddings)
        return cross_entropy(logits.float(), labels, label_smoothing=self.recipe.smoothing) + loss

    @torch.no_grad()
    def logits(self, images: Tensor | Files, grid: int, corners: Tensor | None = None) -> Tensor:
        """float32 logits [n, classes] of stored images, as a grid of so many patches on a side.

        `corners` are where images that keep their size are; None: in the first corner.
        """
        self.model.eval()
        pixels = self.images.squares(images, self.recipe.image_size(grid), self.device)
        if corners is None:
            corners = torch.zeros(len(images), 2, dtype=torch.int64)
        pixels = self.place_images(pixels, grid, corners)
        # Positions are encoded in full precision.
        embeddings = None if self.encoder is None else self.encoder(grid_positions(grid, grid))
        with self.precision():
            return self.model(pixels, embeddings=embeddings).float()

    def measure(self, split: Split, grid: int) -> tuple[float, float]:
        """(Loss in nats, accuracy) of a split's images on a grid, at the same places for all arms and seeds."""
        loss = correct = 0.0
        # As many patches at a time as four batches of training have.
        rows = max(1, 4 * self.recipe.batch * self.recipe.grids[0] ** 2 // grid**2)
        corners = self.corners(len(split), grid, torch.Generator().manual_seed(grid))
        with self.model.position.frozen():
            for start in range(0, len(split), rows):
                part = split[start : start + rows]
                logits, labels = (
                    self.logits(part.images, grid, corners[start : start + rows]),
                    part.labels.to(self.device),
                )
                loss += float(cross_entropy(logits, labels, reduction="sum"))
                correct += float((logits.argmax(-1) == labels).sum())
        return loss / len(split), correct / len(split)


def build_position(recipe: Recipe, arm: str) -> PositionEncoding:
    """The untrained position encoding of an arm."""
    encoding = "seqpe-mul" if arm in ABLATIONS else arm
    options = recipe.encoder_options(encoding, axes=2)
    match encoding:
        case "sinusoidal-2d":
            options = {"scale": recipe.sinusoid_scale}
        case "learned-2d":
            options = {"grid": (recipe.grids[0], recipe.grids[0]), "std": recipe.learned_std}
        case "seqpe-sum" | "seqpe-mul" | "seqpe-bias":
            # Each layer has its own, as in the paper's code for images.
            options["projection"] = "layer"
    return position_encoding(
        encoding, heads=recipe.heads, head_dim=recipe.dim // recipe.heads, layers=recipe.layers, extra_tokens=1,
        **options,
    )  # fmt: skip


def train(session: Session) -> Run:
    """Trains and measures one arm and seed."""
    images, recipe = session.source, session.recipe.fitted(session.source)
    learner = Classifier(recipe, session.arm, images, session.seed, session.device)

    def figures() -> tuple[float, float, float]:
        images_measured = images.held_out[: recipe.eval_images]
        return *learner.measure(images_measured, recipe.grids[0]), learner.measure(images_measured, recipe.grids[-1])[1]

    def accuracy(split: str, grid: int) -> float:
        return learner.measure(getattr(images, split)[: recipe.test_images], grid)[1]

    progress = learner.fit(session, learner.loss, figures, {"images": images.digest, "arm": session.name})
    return finished(session, learner, progress, recipe.grids, accuracy)


TITLES = {
    "nope": "NoPE",
    "sinusoidal-2d": "Sinusoidal",
    "learned-2d": "Learned",
    "rope-2d": "RoPE2D",
    "rope-2d-mix": "RoPE2D-Mix",
    "seqpe-sum": "SeqPE AttnSum",
    "seqpe-mul": "SeqPE AttnMul",
    "seqpe-bias": "SeqPE AttnBias",
    "seqpe-mul-no-delta": "SeqPE AttnMul without L_delta",
    "seqpe-mul-no-ood": "SeqPE AttnMul without L_OOD",
    "seqpe-mul-no-delta-no-ood": "SeqPE AttnMul without both losses",
}
PAPER_GRIDS = (14, 20, 24, 28, 32, 40, 42)
# SeqPE, Tables III, V and IV: accuracy in percent of ViT-S on ImageNet-1k, patches of 16 pixels, by grid.
PAPER = {
    "nope": (78.8, 79.2, 78.5, 77.3, 75.8, 71.7, 70.5),
    "sinusoidal-2d": (80.9, 50.3, 33.3, 32.4, 15.2, 8.8, 8.5),
    "learned-2d": (80.4, 80.6, 79.4, 77.6, 75.4, 70.3, 69.1),
    "rope-2d": (80.9, 81.5, 80.0, 78.2, 76.1, 67.8, 65.0),
    "rope-2d-mix": (80.9, 82.2, 81.8, 80.9, 79.1, 71.6, 68.3),
    "seqpe-sum": (80.9, 80.8, 79.8, 78.5),
    "seqpe-mul": (81.2, 81.8, 81.7, 81.2, 80.5, 77.8, 76.7),
    "seqpe-bias": (80.8, 80.9, 80.1, 79.2),
    "seqpe-mul-no-delta": (81.3, 81.3, 79.3, 76.1),
    "seqpe-mul-no-ood": (81.0, 81.2, 80.7, 80.0),
    "seqpe-mul-no-delta-no-ood": (81.1, 81.2, 79.7, 77.1),
}


class ResolutionStudy(PositionStudy):
    """Image classifiers at larger images than they were trained on."""

    name = "resolution"
    recipe_type = Recipe
    presets = PRESETS
    notes = NOTES
    titles = TITLES
    defaults, ablations = IMAGE_ENCODINGS, tuple(ABLATIONS)
    published, published_of, published_at = PAPER, "ViT-S on ImageNet", PAPER_GRIDS
    kind = "images"
    sizes = (
        "quick: seconds a run; short: trained on a grid of 8 x 8 patches and tested on up to 24 x 24, minutes a run on "
        "a CPU; canvas, ours: images keep their size on a canvas of 6 x 6 to 18 x 18 patches, a minute a run; "
        "seqpe-imagenet: ViT-S, trained on 224 x 224 pixels, on a GPU"
    )
    measured = "Accuracy in percent, held-out images", "Accuracy in percent, images that no choice was made on"
    train = staticmethod(train)

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--data", default="digits",
            help="digits (scikit-learn's), fashion-mnist (Debian's dataset-fashion-mnist), a folder of IDX files with "
            "MNIST's names, or one in ImageNet's layout, train/CLASS/*.JPEG and val/CLASS/*.JPEG "
            "(default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--workers", type=whole(0, 1000), metavar="N",
            help="processes that read and change a folder's training images while the model trains; results do not "
            "depend on it (default: one for each core but that of training, at most 16)",
        )  # fmt: skip
        super().add_own(parser)

    def load(self, options: argparse.Namespace, recipe: Recipe) -> Images:
        images = load_images(options.data)
        if isinstance(images.train.images, Files):
            spare = min(16, max(0, cores() // (launched().count * (options.processes or 1)) - 1))
            images = replace(images, workers=spare if options.workers is None else options.workers)
        return images

    def fitted(self, recipe: Recipe, source: Images) -> Recipe:
        recipe = recipe.fitted(source)
        # Here what is missing is said before the first run.
        recipe.augment(source.classes)
        return recipe

    def about(self, recipe: Recipe, arms: Sequence[str], source: Images) -> str:
        first, last = (f"{grid} x {grid}" for grid in (recipe.grids[0], recipe.grids[-1]))
        return (
            f"Classifiers of {recipe.size} x {recipe.size} pixels, {first} patches, tested on up to {last}: "
            f"{len(arms)} position encodings, {recipe.steps} steps of {recipe.batch}; {source.name}, "
            f"{len(source.train)} training images, {source.digest}"
        )

    def file(self, options: argparse.Namespace, recipe: Recipe) -> str:
        # A variant shares the results file of the preset that it belongs to.
        return f"{Path(options.data).name}-{'short' if self.variant(recipe) else options.preset}"

    def variant(self, recipe: Recipe) -> str:
        return "canvas" if recipe.object_grid else ""

    def headings(self, lengths: Sequence[int]) -> list[str]:
        return [f"{grid / lengths[0]:.3g}x, {grid}x{grid}" for grid in lengths]

    def rows(self, runs: Sequence[Run], recipe: Recipe, split: str = "test") -> Rows:
        """Accuracy in percent on each grid."""
        return self.by_length(runs, split, lambda share: 100 * share, "{:.1f}")

    def paper_rows(self, recipe: Recipe) -> Sequence[Rows]:
        # The paper has no images that keep their size.
        return [] if recipe.object_grid else super().paper_rows(recipe)

    def paper_cell(self, figure: float) -> str:
        return f"{figure:.1f}"

    def captioned(self, group: Sequence[SavedRun]) -> Sequence[tuple[Rows, str]]:
        recipe = group[0].recipe
        rows = self.rows(runs(group), recipe)
        rows[0][0] = group[0].source.split()[-1]
        how = f"{recipe.steps} steps of {recipe.batch} images of {recipe.size} x {recipe.size} pixels"
        if recipe.object_grid:
            rows[0][0] += " on a canvas (ours)"
            how += f", in which {recipe.image_size(0)} x {recipe.image_size(0)} are the image's at every size"
        caption = f"Accuracy in percent, images on which nothing was chosen; {how}. {machine_caption(group)}."
        return [(rows, caption)]

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Pictures:
        """Accuracy against the size, ours and, where it has such figures, the paper's."""
        ours = self.lines(runs, lambda share: 100 * share, min(int(grid) for grid in runs[0].test))
        panels = [Panel("accuracy (%)", ours, beyond=True)]
        if not self.variant(recipe):
            paper = self.paper_lines(runs, scale=PAPER_GRIDS[0])
            panels.append(Panel("paper: ViT-S on ImageNet", paper, beyond=True))
        return {"resolution": draw_lengths(panels, "Image classifiers at larger sizes than they were trained at")}

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        embedded = dict.fromkeys(job.arm for job in plan.jobs if job.arm == "learned-2d" or job.arm.startswith("seqpe"))
        states = {arm: path for arm in embedded if checkpoints.find(path := out / f"{arm}-0")}
        return [draw_embeddings(out / "similarity.png", plan.recipe, states)] if states else []


def draw_embeddings(path: Path, recipe: Recipe, states: Mapping[str, Path]) -> Path:
    """How alike the embeddings of some cells of the training grid are with all, as a PNG file (SeqPE, Figure 3).

    `states` are by arm, "learned-2d" or SeqPE's, the folder of its run.
    """
    from gistkit_lab.viz.grids import draw_grid_similarity

    embeddings: dict[str, Any] = {}
    for arm, state in states.items():
        position = build_position(recipe, arm).eval()
        load_part(position, state, "position.")
        if isinstance(position, SeqPEPositions):
            with torch.no_grad():
                embeddings[TITLES[arm]] = position.encoder.table(recipe.grids[0], recipe.grids[0])
        elif isinstance(position, Learned2D):
            embeddings[TITLES[arm]] = position.table.detach()
        else:
            raise ValueError(f"states: expected arms with an embedding of each position, got {arm!r}")
    write_picture(path, draw_grid_similarity(embeddings), dpi=100)
    return path


STUDY = ResolutionStudy()
