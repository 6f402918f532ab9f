"""Runs of the study `voco`: trains and measures one arm and seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from gistkit.hf import attach
from gistkit.hf.vision import Vision
from gistkit.inspect import AttentionRecorder
from gistkit.train import checkpoints
from gistkit_lab.studies.fitting import Progress, exclusively, optimise
from gistkit_lab.studies.resolution.images import Images
from gistkit_lab.studies.voco.mosaics import TURN, Batch, Mosaics
from gistkit_lab.studies.voco.reader import Compressed, Plain, Reader, build_reader
from gistkit_lab.studies.voco.study import Arm, Recipe, fresh_model
from gistkit_lab.studies.voco.words import KINDS, Words

# What `Mosaics` are drawn for.
TOWER, BASE, ARM = range(3)


@dataclass
class Run:
    """The results of one arm and seed: "loss" in nats an answer, and the share of right answers of each kind.

    `curve` holds (step, loss, at, count, left) over held-out mosaics; `held_out` and `test` the figures of the trained
    model, the second of items on which nothing was chosen, read once. A kind that is not asked for has nan.
    """

    method: str
    ratio: float
    seed: int
    curve: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0


def train(
    recipe: Recipe,
    arm: Arm,
    seed: int,
    images: Images,
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    bar: Any,
) -> Run:
    """Trains and measures one arm and seed; `out` gets its state at every evaluation, from which it can resume.

    `out` also gets the seed's model, which its arms share.
    """
    mosaics = Mosaics(images, recipe, seed)
    model = _base(recipe, mosaics, out, device, bar)
    torch.manual_seed(seed)
    reader = build_reader(recipe, arm, model)
    if isinstance(reader, Compressed):
        reader.compressor.to(device)
    run = Run(arm.method, arm.ratio, seed, parameters=sum(value.numel() for _, value in reader.trained()))
    progress = _fit_reader(recipe, arm.name, ARM, reader, mosaics, out, resume, bar)
    run.curve, run.seconds = progress.curve, progress.seconds
    with attach(model):
        for name in ("held_out", "test"):
            setattr(run, name, measure(reader, mosaics.split(name, recipe.test_mosaics)))
    return run


@torch.no_grad()
def measure(reader: Reader, batch: Batch, at_once: int = 16) -> dict[str, float]:
    """{"loss", and each of `KINDS`}: nats an answer, shares of right answers. The reader's model is attached."""
    losses, right = [], []
    for pixels, text in zip(batch.pixels.split(at_once), batch.text.split(at_once), strict=True):
        logits, answers = _answers(reader, pixels, text)
        losses.append(cross_entropy(logits, answers, reduction="none").cpu())
        right.append((logits.argmax(-1) == answers).float().cpu())
    all_right, kinds = torch.cat(right), batch.text[:, 1::TURN].flatten()
    shares = {name: float(all_right[kinds == Words.kind(name)].mean()) for name in KINDS}
    return {"loss": float(torch.cat(losses).mean()), **shares}


def _answers(reader: Reader, pixels: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B Q, V] of answers, and the answers [B Q]."""
    device = reader.model.device
    text = text.to(device)
    logits = reader.answers(pixels.to(device), text).flatten(0, 1).float()
    return logits, text[:, TURN - 1 :: TURN].flatten()


def _fit_reader(
    recipe: Recipe, name: str, stage: int, reader: Reader, mosaics: Mosaics, out: Path, resume: bool, bar: Any
) -> Progress:
    held_out = mosaics.split("held_out", recipe.eval_mosaics)

    def loss(step: int) -> Tensor:
        batch = mosaics(stage, step, recipe.batch)
        return cross_entropy(*_answers(reader, batch.pixels, batch.text))

    def figures() -> tuple[float, ...]:
        return tuple(measure(reader, held_out).values())

    with attach(reader.model):
        return _fit(recipe, name, mosaics, reader.trained(), loss, figures, out, resume, bar)


def _fit(
    recipe: Recipe, name: str, mosaics: Mosaics, parameters: list[tuple[str, nn.Parameter]],
    loss: Callable[[int], Tensor], figures: Callable[[], tuple[float, ...]], out: Path, resume: bool, bar: Any,
) -> Progress:  # fmt: skip
    # The measurements at the end do not determine a run.
    decides = {key: value for key, value in asdict(recipe).items() if key != "test_mosaics"}
    identity = {"recipe": decides, "images": mosaics.images.digest, "arm": name, "seed": mosaics.seed}
    return optimise(
        recipe, parameters, loss, figures, out / f"{name}-{mosaics.seed}", identity, resume=resume, bar=bar,
    )  # fmt: skip


def _base(recipe: Recipe, mosaics: Mosaics, out: Path, device: str, bar: Any) -> LlavaForConditionalGeneration:
    """The model that the arms of a seed start from, whose tower sees items; each gets its own copy."""
    model = fresh_model(recipe, mosaics.images, mosaics.seed)
    nn.Module.to(model, device)
    with exclusively(out / f"base-{mosaics.seed}.lock"):
        # The tower is a part of the base's state, too.
        if not checkpoints.find(out / f"base-{mosaics.seed}"):
            _train_tower(recipe.tower, model, mosaics, out, bar)
        _fit_reader(recipe.base, "base", BASE, Plain(model, recipe.vision_tokens), mosaics, out, True, bar)
    return model


def _train_tower(recipe: Recipe, model: LlavaForConditionalGeneration, mosaics: Mosaics, out: Path, bar: Any) -> None:
    """Each vision token learns to name its item and its cell, by a linear map that is not kept."""
    vision, items = Vision(model), mosaics.words.items
    head = nn.Linear(recipe.dim, items + recipe.cells).to(model.device)
    parts = {"tower": vision.tower, "projector": vision.projector, "head": head}
    parameters = [
        (f"{part}.{name}", value) for part, module in parts.items() for name, value in module.named_parameters()
    ]
    line = torch.arange(recipe.grid) // recipe.patches
    cell = (line[:, None] * recipe.side + line).flatten()

    def figures(batch: Batch) -> tuple[Tensor, Tensor]:
        logits = head(torch.stack(vision.features({"pixel_values": batch.pixels.to(model.device)}))).flatten(0, 1)
        labels = batch.labels[:, cell].flatten().to(logits.device)
        cells = cell.repeat(len(batch.labels)).to(logits.device)
        loss = cross_entropy(logits[:, :items], labels) + cross_entropy(logits[:, items:], cells)
        return loss, (logits[:, :items].argmax(-1) == labels).float().mean()

    @torch.no_grad()
    def measured() -> tuple[float, float]:
        loss, share = figures(mosaics.split("held_out", recipe.eval_mosaics))
        return float(loss), float(share)

    _fit(
        recipe, "tower", mosaics, parameters, lambda step: figures(mosaics(TOWER, step, recipe.batch))[0], measured,
        out, True, bar,
    )  # fmt: skip


def trained_reader(recipe: Recipe, arm: Arm, seed: int, images: Images, out: Path) -> Reader:
    """The reader of an arm as a run left it, whose checkpoints are in `out`."""
    model = fresh_model(recipe, images, seed)
    checkpoints.restore(checkpoints.last_whole(out / f"base-{seed}", remove=False), model.named_parameters())
    reader = build_reader(recipe, arm, model)
    checkpoints.restore(checkpoints.last_whole(out / f"{arm.name}-{seed}", remove=False), reader.trained())
    return reader


@torch.no_grad()
def sight(reader: Reader, recipe: Recipe, batch: Batch) -> Tensor:
    """Where VoCo tokens look on the first mosaic of a batch: float [M, side, side], a share of attention a patch.

    Args:
        reader: with VoCo tokens.
        recipe: of the reader.
        batch: whose first mosaic is looked at.

    Returns:
        The mean over layers and heads of the attention over vision tokens, of which the rest is over text and VoCo
        tokens.
    """
    if not isinstance(reader, Compressed):
        raise TypeError(f"reader: expected one with VoCo tokens, got {type(reader).__name__}")
    compressor = reader.compressor
    rows = compressor.contexts(reader.context(batch.pixels[:1]))
    order = compressor.pass_over(rows, compressor.vision.features(rows.pixels)).plan.order
    # In logical order BOS comes first, then the image, then its VoCo tokens.
    total = 1 + recipe.vision_tokens + compressor.memory_tokens
    place = torch.arange(total) if order is None else order[0].argsort()
    seen, voco = place[1 : 1 + recipe.vision_tokens], place[1 + recipe.vision_tokens : total]
    with attach(reader.model), AttentionRecorder(rows=voco, reduce="mean") as recorder:
        compressor.compress_rows(rows)
    maps = torch.stack([layer.weights[0, 0][:, seen] for layer in recorder.maps])
    return maps.mean(0).unflatten(-1, (recipe.grid, recipe.grid))
