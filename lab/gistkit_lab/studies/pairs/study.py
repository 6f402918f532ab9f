"""Study `pairs`: contexts of keys and values, every key of which is asked for, under each method at several ratios.

A mean of tokens loses what belongs to what, so that a method has to learn what to keep. A small decoder first learns
to look values up in the full context; from there each arm learns to read its compressed form. All arms of a seed have
the same model, steps and contexts (Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool),
Figure 2 and Table 3, where the contexts are SQuAD's and others and the model is Gemma2 2B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gistkit_lab.studies.fitting import FallingRecipe

SPLITS = {"train": 0, "held_out": 1, "test": 2}
# Methods of the study `in-place` that run unless others are asked for.
METHODS = ("no", "full", "gist", "sep-offset-gist", "avgpool", "gistpool")


@dataclass(frozen=True)
class Recipe(FallingRecipe):
    """Everything that determines a run except its arm and seed.

    Args:
        keys, values: different tokens of each kind.
        fewest, most: pairs of a context; each key occurs once in it.
        length, filler: tokens of a context, and different tokens of the third kind, among which its pairs then lie at
            random places; 0 and 0: pairs alone.
        base_steps, base_rate: of the training on the full context that the arms of a seed share.
        memory_factor: learning rate of the gists' own parameters, over that of the others.
        dim, layers, heads, rope_theta, weight_std: of the decoder; its first embeddings are three times as large as its
            other weights.
        gated: whether its layers' maps have a gate, as Llama's and Gemma's do.
        alone: whether each key is asked by itself; otherwise they follow each other in one text.
        eval_contexts, test_contexts: at every evaluation, and of each split at the end.
    """

    steps: int = 2000
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    eval_every: int = 100
    keys: int = 32
    values: int = 8
    fewest: int = 15
    most: int = 15
    length: int = 0
    filler: int = 0
    base_steps: int = 1500
    base_rate: float = 2e-3
    memory_factor: float = 3.0
    dim: int = 64
    layers: int = 2
    heads: int = 8
    rope_theta: float = 100.0
    weight_std: float = 0.1
    gated: bool = False
    alone: bool = True
    eval_contexts: int = 256
    test_contexts: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.fewest <= self.most <= self.keys:
            raise ValueError(
                f"fewest, most: expected 1 <= fewest <= most <= keys, got {self.fewest}, {self.most} and {self.keys}"
            )
        if self.length and (self.length < 2 * self.most or not self.filler):
            raise ValueError(
                f"length, filler: expected at least the tokens of {self.most} pairs and a token to lie among them, got "
                f"{self.length} and {self.filler}"
            )

    @property
    def bos(self) -> int:
        """The token before a context."""
        return self.keys + self.values

    @property
    def vocabulary(self) -> int:
        """Keys, values, the token before a context, and filler, in this order."""
        return self.bos + 1 + self.filler


PRESETS = {
    # Contexts of 30 tokens; two minutes of a core for each arm.
    "quick": Recipe(),
    # Contexts of 16 to 40 tokens.
    "varied": Recipe(fewest=8, most=20),
}


class Pairs(NamedTuple):
    """Contexts of keys and values in turn, and the keys in another order with their values.

    Args:
        contexts: int64 [B, 2 n], or [B, length] with filler.
        keys, answers: int64 [B, n]; answers count from the first value.
    """

    contexts: Tensor
    keys: Tensor
    answers: Tensor


def draw(recipe: Recipe, split: str, *numbers: int, rows: int) -> Pairs:
    """Random contexts of one length, the same for the same numbers."""
    random = np.random.default_rng([SPLITS[split], *numbers])
    count = int(random.integers(recipe.fewest, recipe.most + 1))
    keys = random.permuted(np.tile(np.arange(recipe.keys), (rows, 1)), axis=1)[:, :count]
    answers = random.integers(recipe.values, size=(rows, count))
    order = random.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)
    contexts = np.stack([keys, recipe.keys + answers], -1).reshape(rows, -1)
    if recipe.length:
        contexts = _among_filler(contexts, recipe, random)
    asked, expected = (np.take_along_axis(array, order, 1) for array in (keys, answers))
    return Pairs(*(torch.from_numpy(array) for array in (contexts, asked, expected)))


def _among_filler(pairs: np.ndarray, recipe: Recipe, random: np.random.Generator) -> np.ndarray:
    """[B, length] of pairs [B, 2 n]: the pairs in their order, each whole, at random places among filler."""
    rows, count = len(pairs), pairs.shape[1] // 2
    contexts = recipe.bos + 1 + random.integers(recipe.filler, size=(rows, recipe.length))
    # A pair is one of length - n items; those before it have one token more each where they are pairs.
    items = np.tile(np.arange(recipe.length - count), (rows, 1))
    places = np.sort(random.permuted(items, axis=1)[:, :count], 1) + np.arange(count)
    np.put_along_axis(contexts, places, pairs[:, ::2], 1)
    np.put_along_axis(contexts, places + 1, pairs[:, 1::2], 1)
    return contexts


def fresh_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """The untrained decoder of a seed: a Llama, whose layers have a gate or not."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": recipe.vocabulary, "hidden_size": recipe.dim, "intermediate_size": 2 * recipe.dim,
        "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": recipe.weight_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta}, "bos_token_id": recipe.bos,
        "eos_token_id": None,
    }  # fmt: skip
    model: Any
    if recipe.gated:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        # Arcee's is a Llama without gates.
        model = ArceeForCausalLM(ArceeConfig(hidden_act="gelu", **sizes))
    with torch.no_grad():
        # Larger, so that attention tells tokens apart from the first step on.
        model.model.embed_tokens.weight.mul_(3)
    return model  # type: ignore[no-any-return]
