"""Models and encoders from the weights of the released code of SeqPE's paper."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gistkit.nn import GPT, SeqPE, SeqPEPositions
from gistkit.nn.seqpe.positions import Integration
from gistkit_lab.vit import ViT

# Name of a layer's map or norm here: its name there; maps of a GPT-2 and of an encoder's blocks are transposed.
_GPT = {
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "network.up": "mlp.c_fc",
    "network.down": "mlp.c_proj",
}
_VIT = {
    "norm_1": "norm1",
    "norm_2": "norm2",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "network.up": "mlp.fc1",
    "network.down": "mlp.fc2",
}
_LAYER = "transformers."
_BLOCK = {
    "norm_1": "layernorm_1",
    "norm_2": "layernorm_2",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
# Masks that a GPT-2 keeps as buffers, and its tied output embedding.
_LEFT = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")


def reference_model(
    state: Mapping[str, Tensor],
    encoder_state: Mapping[str, Tensor],
    integration: Integration,
    *,
    heads: int | None = None,
) -> GPT | ViT:
    """A `GPT` or `ViT` in eval mode with the weights of a checkpoint of the paper's released code.

    A checkpoint for text is a folder of Accelerate's: `state` is in model.safetensors and `encoder_state` in
    model_1.safetensors. One for images is a dict in a .pth file, with both under "model" and "pe_model". The model's
    `position` also works in transformers' GPT-2 of the same weights, see `gistkit.hf.encode_positions`.

    Args:
        state: of the GPT-2 (`transformer.wte.weight`, ...) or of timm's ViT (`patch_embed.proj.weight`, ...), with the
            projection of positions (`pe_qk`) of all layers, of each, or none.
        encoder_state: of the encoder, see `reference_encoder`.
        integration: not stored in the weights: "sum" is attn_add there, "mul" attn_mul, and "bias" attn_scalar.
        heads: of the model; dim / 64 by default, as in that code.

    Raises:
        ValueError: for a weight that is missing, does not fit the others' shapes, or does not belong to the model.
    """
    if integration not in get_args(Integration):
        raise ValueError(f"integration: expected {', '.join(get_args(Integration))}, got {integration!r}")
    images = "patch_embed.proj.weight" in state
    left = {name.removeprefix("transformer."): tensor.detach() for name, tensor in state.items()}

    def take(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"state: expected a weight {name!r}, got {len(state)} others")
        return left.pop(name)

    weights: dict[str, Tensor] = {}

    def move(ours: str, theirs: str) -> None:
        weights.update({f"{ours}.{part}": take(f"{theirs}.{part}") for part in ("weight", "bias")})

    names, list_name, norm = (_VIT, "blocks", "norm") if images else (_GPT, "h", "ln_f")
    layers = len({name.split(".")[1] for name in left if name.startswith(f"{list_name}.")})
    if images:
        patches = take("patch_embed.proj.weight")
        weights |= {"patches.weight": patches.flatten(1), "patches.bias": take("patch_embed.proj.bias")}
        weights |= {"cls": take("cls_token").flatten(), "position.extra": take("cls_token_pos_embed")[0]}
        move("head", "head")
        dim = len(patches)
    else:
        tokens = take("wte.weight")
        weights |= {"tokens.weight": tokens, "head.weight": tokens}
        dim = tokens.shape[1]
    heads = max(dim // 64, 1) if heads is None else heads
    encoder = reference_encoder(encoder_state)
    shared = "pe_qk.weight" in left
    projections = ["pe_qk"] if shared else [f"{list_name}.{i}.attn.pe_qk" for i in range(layers)]
    if not shared and not any("pe_qk" in name for name in left):
        projections = []
    for i, name in enumerate(projections):
        move(f"position.projections.{i}", name)
    for i in range(layers):
        for ours, theirs in names.items():
            move(f"blocks.{i}.{ours}", f"{list_name}.{i}.{theirs}")
            if not images:
                weights[f"blocks.{i}.{ours}.weight"] = _transposed(weights[f"blocks.{i}.{ours}.weight"])
    move("norm", norm)
    unknown = [name for name in left if images or not _LEFT.fullmatch(name)]
    if unknown:
        raise ValueError(f"state: expected the weights of a model with SeqPE, got others too: {', '.join(unknown[:5])}")
    position = SeqPEPositions(
        encoder, heads, dim // heads, layers=layers, integration=integration, extra_tokens=int(images),
        projection="shared" if shared else "layer" if projections else "none",
    )  # fmt: skip
    # Its weights are the checkpoint's already.
    weights |= {f"position.encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    hidden_dim = weights["blocks.0.network.up.weight"].shape[0] if layers else None
    with torch.random.fork_rng(devices=[]):
        model: GPT | ViT
        if images:
            channels, patch = patches.shape[1:3]
            model = ViT(
                patch, channels, len(weights["head.weight"]), dim, layers, heads, position, hidden_dim=hidden_dim
            )  # fmt: skip
        else:
            model = GPT(len(tokens), dim, layers, heads, position, hidden_dim=hidden_dim, style="gpt2")
    _load(model.to(next(iter(weights.values())).dtype), weights, f"dim {dim} and {heads} heads")
    return model.eval()


def _transposed(weight: Tensor) -> Tensor:
    # One of more dimensions fits no map, which `_load` tells.
    return weight.t() if weight.ndim == 2 else weight


def _load(model: nn.Module, weights: Mapping[str, Tensor], sizes: str) -> None:
    """Gives a model its weights; `sizes`: what their shapes follow from."""
    for name, parameter in model.named_parameters():
        if parameter.shape != weights[name].shape:
            shapes = list(parameter.shape), list(weights[name].shape)
            raise ValueError(f"state: expected {shapes[0]} for {name}, as {sizes} imply, got {shapes[1]}")
    model.load_state_dict(weights)


def reference_encoder(state: Mapping[str, Tensor], *, heads: int | None = None) -> SeqPE:
    """An encoder with the weights of the paper's released code.

    Args:
        state: a state dict with that code's names (`token_of_seqpe_embed.weight`, `transformers.0.attn...`).
        heads: dim / 64 by default, as in that code.

    Raises:
        ValueError: for a missing name, or a weight that does not fit the others' shapes.
    """

    def weight(name: str) -> Tensor:
        if name not in state:
            raise ValueError(f"state: expected a weight {name!r}, got {len(state)} others")
        return state[name].detach()

    tokens, places, out = (
        weight(f"{name}.weight") for name in ("token_of_seqpe_embed", "pos_of_seqpe_embed", "out_proj")
    )
    axes = len(weight("dim_token_embed")) if "dim_token_embed" in state else 1
    layers = len({name.split(".")[1] for name in state if name.startswith(_LAYER)})
    weights: dict[str, Tensor] = {"tokens": tokens, "places": places, "cls": weight("cls_token_embed").flatten()}
    if axes > 1:
        weights["dimensions"] = weight("dim_token_embed").flatten(1)
    for ours, theirs in (("norm", "layernorm"), ("out", "out_proj")):
        weights |= {f"{ours}.{part}": weight(f"{theirs}.{part}") for part in ("weight", "bias")}
    for i in range(layers):
        for ours, theirs in _BLOCK.items():
            weights[f"blocks.{i}.{ours}.weight"] = _transposed(weight(f"{_LAYER}{i}.{theirs}.weight"))
            weights[f"blocks.{i}.{ours}.bias"] = weight(f"{_LAYER}{i}.{theirs}.bias")
    sizes: dict[str, Any] = {"base": len(tokens), "digits": len(places) // axes, "axes": axes, "layers": layers}
    encoder = SeqPE(tokens.shape[1], out_dim=len(out), heads=heads, shared_places=False, **sizes).to(tokens.dtype)
    _load(encoder, weights, f"dim {encoder.dim}, {axes} axes and {encoder.digits} digits")
    return encoder
