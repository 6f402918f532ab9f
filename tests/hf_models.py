"""Small random transformers models, and their own attention as an oracle in double precision."""

import contextlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(**changes):
    """A two-layer Llama in double precision, in eval mode.

    Its own attention is torch's: transformers' eager form takes its softmax in single precision whatever the model's.
    """
    settings = {
        "vocab_size": 50,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).double().eval()


@contextlib.contextmanager
def double_angles(model):
    """transformers' own RoPE with angles in double precision, so that nothing but rounding separates the two."""
    rotary = model.model.rotary_emb

    def forward(x, position_ids):
        angles = position_ids[..., None].double() * rotary.inv_freq.double()
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    rotary.forward = forward
    try:
        yield model
    finally:
        del rotary.forward


def additive(mask):
    """A boolean mask [..., Nq, Nk] as the 4-D additive mask that transformers passes on untouched."""
    mask = mask if mask.dim() == 4 else mask[None, None]
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
