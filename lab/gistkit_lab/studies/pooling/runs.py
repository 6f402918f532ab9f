"""Study `pooling`: can one attention layer learn to average windows of its context?

A standard Gemma2 layer reads n context embeddings and then ceil(n / r) learned gist embeddings; its output at gist j
should be the mean of window j (GistPool, Section 6.1). Under the pool mask a gist sees its own window and itself, under
the standard one everything before it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gistkit.hf import attach
from gistkit.train.recipe import warmed_up
from gistkit_lab.studies.fitting import optimise
from gistkit_lab.studies.pooling.inputs import Inputs, make_inputs
from gistkit_lab.studies.pooling.layer import (
    PoolingLayer,
    Recipe,
    Setting,
    attention_of_gists,
    share_in_window,
    share_right,
    window_means,
)


@dataclass
class Run:
    """The results of one setting, on embeddings it was not trained on.

    `share` is the share of predicted vectors whose nearest window mean of their sequence is their own; `error` the
    mean squared error divided by that of predicting zeros; `in_window` the share of a gist's attention on the context
    that lies in its own window, and `attention` [m, n] the weights of gists over the context, means over sequences and
    heads at the longest context. `curve` holds (step, error, share).
    """

    setting: Setting
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    share: float = float("nan")
    error: float = float("nan")
    in_window: float = float("nan")
    seconds: float = 0.0
    parameters: int = 0
    attention: list[list[float]] = field(default_factory=list)


def draw(inputs: Inputs, setting: Setting, batch: int, seed: int) -> Tensor:
    """A batch of contexts [B, n, width], all of one length."""
    length, generator = _draw_length(setting, seed)
    return inputs.draw(batch, length, generator)


def _draw_length(setting: Setting, seed: int) -> tuple[int, torch.Generator]:
    """The length of the contexts of a seed, and what draws these."""
    generator = torch.Generator().manual_seed(seed)
    low, high = setting.lengths
    return int(torch.randint(low, high + 1, (1,), generator=generator)), generator


def chance(recipe: Recipe, setting: Setting) -> float:
    """Share of right vectors of a guess on what a trained layer is measured on, whose lengths may vary."""
    lengths = [_draw_length(setting, seed)[0] for seed in _seeds(2, recipe.final_batches)]
    return sum(1 / -(-length // setting.ratio) for length in lengths) / len(lengths)


@torch.no_grad()
def evaluate(layer: PoolingLayer, inputs: Inputs, batch: int, seeds: Sequence[int]) -> tuple[float, float]:
    """(error, share) as in `Run`, means over one batch a seed."""
    squared = zeros = share = 0.0
    for seed in seeds:
        context = draw(inputs, layer.setting, batch, seed)
        means = window_means(context, layer.setting.ratio)
        predicted = layer(context)
        squared += float(functional.mse_loss(predicted, means))
        zeros += float(means.square().mean())
        share += share_right(predicted, means)
    return squared / zeros, share / len(seeds)


def train(recipe: Recipe, setting: Setting, out: Path, *, device: str = "cpu", resume: bool = False, bar: Any) -> Run:
    """Trains and measures one setting.

    Args:
        recipe, setting: what decides the run.
        out: folder of the unfinished run, with a checkpoint of every evaluation; removed at the end.
        device: torch device.
        resume: go on from `out` if it is of this run.
        bar: progress bar, as tqdm's.
    """
    torch.manual_seed(setting.seed)
    layer = PoolingLayer(recipe, setting).to(device)
    parameters = [parameter for _, parameter in layer.trainable()]
    inputs = make_inputs(setting.inputs, recipe.width).to(device)
    run = Run(setting, parameters=sum(parameter.numel() for parameter in parameters))

    def loss(step: int) -> Tensor:
        # Each step has a seed of its own: a resumed run draws what the whole one would have.
        context = draw(inputs, setting, recipe.batch, _seeds(3 + setting.seed, recipe.steps)[step])
        return functional.mse_loss(layer(context), window_means(context, setting.ratio))

    with attach(layer.model):
        progress = optimise(
            recipe, list(layer.trainable()), loss,
            lambda: evaluate(layer, inputs, recipe.batch, _seeds(1, recipe.eval_batches)), out,
            {"recipe": asdict(recipe), "setting": asdict(setting)},
            optimizer=torch.optim.Adam(parameters, lr=setting.learning_rate),
            learning_rate=lambda step: warmed_up(setting.learning_rate, step, recipe.warmup),
            resume=resume, bar=bar, enough=lambda figures: figures[1] >= recipe.enough,
        )  # fmt: skip
        run.curve, run.seconds = progress.curve, progress.seconds
        run.error, run.share = evaluate(layer, inputs, recipe.batch, _seeds(2, recipe.final_batches))
        longest = replace(setting, context="fixed")
        attention = attention_of_gists(layer, draw(inputs, longest, recipe.batch, _seeds(2, 1)[0]))
    run.in_window = share_in_window(attention, setting.ratio)
    run.attention = [[round(float(weight), 5) for weight in row] for row in attention]
    shutil.rmtree(out, ignore_errors=True)
    return run


def _seeds(stream: int, count: int) -> range:
    """Seeds of a stream: 1 is drawn while training is watched, 2 at its end, 3 + s trains seed s."""
    return range(stream << 32, (stream << 32) + count)


def grid(seeds: int = 1, **axes: Sequence[Any]) -> list[Setting]:
    """All settings of the given values; `axes` are those of `Setting`, with heads as (heads, key heads) pairs."""
    settings = []
    for values in product(*axes.values(), range(seeds)):
        setting = dict(zip([*axes, "seed"], values, strict=True))
        if "heads" in setting:
            setting["heads"], setting["kv_heads"] = setting["heads"]
        settings.append(Setting(**setting))
    return settings
