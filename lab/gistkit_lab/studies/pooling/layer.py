"""The layer of the study `pooling`: one Gemma2 layer with gists after its context, and what is asked of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2Model

from gistkit import layouts
from gistkit.inspect import AttentionRecorder
from gistkit.layouts import Layout, Plan, Role
from gistkit_lab.studies.pooling.inputs import INPUTS

MASKS = ("pool", "standard")
# Of "at-zero" the length varies, and all gists have position id 0.
CONTEXTS = ("fixed", "variable", "at-zero")


@dataclass(frozen=True)
class Setting:
    """One cell of the study with its learning rate and seed.

    Args:
        inputs: one of `INPUTS`.
        mask: "pool" or "standard".
        context: "fixed", "variable" or "at-zero".
        ratio: context embeddings a window, at least 1.
        length: context embeddings; where the length varies the most there are, and half of it the least.
        heads, kv_heads: of the attention; the head dimension is the width divided by `heads`.
        learning_rate: of Adam.
        seed: of weights and of what is drawn for training.
    """

    inputs: str = "sphere"
    mask: str = "pool"
    context: str = "fixed"
    ratio: int = 2
    length: int = 20
    heads: int = 1
    kv_heads: int = 1
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("inputs", INPUTS), ("mask", MASKS), ("context", CONTEXTS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not 1 <= self.ratio <= self.lengths[0]:
            raise ValueError(f"ratio: expected 1 to the shortest context, {self.lengths[0]}, got {self.ratio}")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of the key heads, got {self.heads}/{self.kv_heads}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate: expected a number above 0, got {self.learning_rate}")

    @property
    def name(self) -> str:
        """A name for files, different for every setting."""
        layer = f"{self.heads}-{self.kv_heads}-{self.ratio}x-{self.length}"
        return f"{self.inputs}-{self.mask}-{self.context}-{layer}-{self.learning_rate:g}-{self.seed}"

    @property
    def lengths(self) -> tuple[int, int]:
        """The shortest and the longest context."""
        return (self.length if self.context == "fixed" else max(1, self.length // 2)), self.length


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run except its setting.

    Args:
        steps: updates at most; training ends at the first evaluation with a share of right vectors of `enough`.
        batch: sequences of a step, all of one length.
        width, mlp: sizes of the layer.
        warmup: steps over which the learning rate grows.
        clip: largest norm of the gradient.
        init_std: of the layer's matrices; the default is that of torch's own linear layers.
        eval_every: steps from one evaluation to the next.
        eval_batches, final_batches: batches of an evaluation, and of the one after training.
    """

    steps: int = 500
    batch: int = 32
    width: int = 128
    mlp: int = 512
    warmup: int = 50
    clip: float = 1.0
    init_std: float = (3 * 128) ** -0.5
    enough: float = 0.999
    eval_every: int = 50
    eval_batches: int = 4
    final_batches: int = 16


@lru_cache(maxsize=256)
def build_layout(mask: str, context: int, ratio: int, at_zero: bool = False) -> Layout:
    """[context][gists] without BOS; positions count through both, or are 0 at the gists.

    Args:
        mask: "pool" (GistPool with one window) or "standard" (Gist: plain causal).
        context: context embeddings n, at least 1.
        ratio: context embeddings a window; the last window may be shorter.
        at_zero: all gists have position id 0.
    """
    if mask == "pool":
        with_bos = layouts.gistpool(context, ratio, windows=1, memory_sees_bos=False)
    else:
        with_bos = layouts.gist(context, ratio)
    layout = with_bos.take(with_bos.roles != Role.BOS, name=f"{mask} mask {ratio}x")
    gist = layout.roles == Role.MEMORY
    positions = np.cumsum(~gist) - 1
    positions[gist] = 0 if at_zero else context + np.arange(gist.sum())
    return replace(layout, positions=positions)


@lru_cache(maxsize=256)
def _plan(mask: str, context: int, ratio: int, at_zero: bool, device: str) -> Plan:
    # Grouped by role the context comes first, whatever the layout's logical order.
    return build_layout(mask, context, ratio, at_zero).compile(device=device)


class PoolingLayer(nn.Module):
    """One Gemma2 layer and the embeddings of its gists, one for each window of the longest context."""

    def __init__(self, recipe: Recipe, setting: Setting) -> None:
        super().__init__()
        if recipe.width % setting.heads:
            raise ValueError(f"heads: expected a divisor of the width {recipe.width}, got {setting.heads}")
        self.setting = setting
        head_dim = recipe.width // setting.heads
        config = Gemma2Config(
            vocab_size=1,
            hidden_size=recipe.width,
            intermediate_size=recipe.mlp,
            num_hidden_layers=1,
            num_attention_heads=setting.heads,
            num_key_value_heads=setting.kv_heads,
            head_dim=head_dim,
            query_pre_attn_scalar=head_dim,
            initializer_range=recipe.init_std,
            layer_types=["full_attention"],
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        model: Any = Gemma2Model(config)
        # The target is the layer's output: the norm that a whole model ends with would fix its length.
        model.norm = nn.Identity()
        model.embed_tokens.requires_grad_(False)
        self.model = model
        gists = -(-setting.length // setting.ratio)
        self.gists = nn.Parameter(torch.randn(gists, recipe.width) / math.sqrt(recipe.width))

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """What trains, by name."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def forward(self, context: Tensor) -> Tensor:
        """The layer's outputs [B, m, width] at the gists, for context embeddings [B, n, width]; under `attach`."""
        setting, (batch, length, _) = self.setting, context.shape
        plan = _plan(setting.mask, length, setting.ratio, setting.context == "at-zero", str(context.device))
        gists = self.gists[: plan.num_keys - length].expand(batch, -1, -1)
        out = self.model(inputs_embeds=torch.cat([context, gists], 1), plan=plan, use_cache=False).last_hidden_state
        return out[:, length:]


def window_means(context: Tensor, ratio: int) -> Tensor:
    """Means [B, ceil(n / ratio), d] of windows of `ratio` vectors out of [B, n, d]; the last may be shorter."""
    full_length = context.shape[1] // ratio * ratio
    means = context[:, :full_length].unflatten(1, (-1, ratio)).mean(2)
    return (
        means
        if full_length == context.shape[1]
        else torch.cat([means, context[:, full_length:].mean(1, keepdim=True)], 1)
    )


def share_right(predicted: Tensor, means: Tensor) -> float:
    """Share of predicted vectors [B, m, d] whose nearest mean [B, m, d] of their own sequence is that of their index.

    Nearest by Euclidean distance (GistPool, Section 6.1).
    """
    nearest = torch.cdist(predicted, means).argmin(-1)
    return float((nearest == torch.arange(means.shape[1], device=means.device)).float().mean())


@torch.no_grad()
def attention_of_gists(layer: PoolingLayer, context: Tensor) -> Tensor:
    """[m, n], the weights of the gists over the context [B, n, d], mean over sequences and heads; under `attach`."""
    length = context.shape[1]
    with AttentionRecorder(rows=slice(length, None), reduce="mean") as recorder:
        layer(context)
    return recorder[0].weights[:, 0, :, :length].mean(0)


def share_in_window(attention: Tensor, ratio: int) -> float:
    """Mean share of the gists' attention [m, n], of what falls on the context, that lies in their own windows."""
    gists, length = attention.shape
    in_own_window = torch.arange(length)[None] // ratio == torch.arange(gists)[:, None]
    return float(((attention * in_own_window).sum(-1) / attention.sum(-1)).mean())
