"""The models of the studies `in-place` and `nuggets`: SmolLM2-135M, or a small Llama on bytes, trained from scratch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gistkit.hf.smollm2 import load_smollm2


def sizes(presets: Mapping[str, object], paper: str = "") -> str:
    """What the presets are. `paper`: what else the preset "paper" is."""
    long = "long: the same for more steps, ten minutes an arm; " if "long" in presets else ""
    return (
        f"quick: a small model from scratch; {long}short: SmolLM2-135M, minutes a run on a CPU; paper: SmolLM2-135M on "
        f"a GPU{paper}"
    )


def tokenizer(recipe: Any) -> Any:
    """The tokenizer of a recipe's model; None for bytes."""
    return smollm2()[1] if recipe.model == "smollm2" else None


def fresh_model(recipe: Any, seed: int, *, initializer_range: float, rope_theta: float) -> PreTrainedModel:
    """A copy of the pretrained model, or a small one with the random weights of a seed.

    The width of the initial weights, and the base of the rotation, decide what so small a model learns.
    """
    if recipe.model == "smollm2":
        return copy.deepcopy(smollm2()[0])
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True,
            initializer_range=initializer_range, rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            bos_token_id=256, eos_token_id=None,
        )
    )  # fmt: skip


@lru_cache(maxsize=1)
def smollm2(dtype: str = "float32") -> Any:
    """(model, tokenizer) of SmolLM2-135M, which nobody may change."""
    return load_smollm2(dtype=getattr(torch, dtype))
