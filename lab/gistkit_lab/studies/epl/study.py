"""Study `epl`: one small autoencoder under several position layouts, trained from scratch on bytes.

A Llama of 0.4M parameters compresses 80 bytes into 16 memory tokens (ICAE carrier) and reconstructs them. Only the
position ids differ between the runs of a seed (Position IDs Matter, Tables 1-3 and the AE-loss curves).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit.compress import ICAE, Compressor
from gistkit_lab.studies.reconstruction import ReconstructionRecipe


@dataclass(frozen=True)
class Recipe(ReconstructionRecipe):
    """Everything that determines a run except its layout and seed."""

    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 2
    heads: int = 4
    rope_theta: float = 1e4


def build_compressor(recipe: Recipe, layout: str, seed: int, losses: Sequence[str] = ("ae",)) -> Compressor:
    """The untrained model of a seed: the same weights whatever the layout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * recipe.layers) ** -0.5)
    return ICAE(model, chunk=recipe.chunk, ratio=recipe.ratio, layout=layout, losses=losses, lora=None)
