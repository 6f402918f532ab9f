"""Whole checkpoints of the paper's released code, against a small form of that code in torch's own functions."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from gistkit import hf
from gistkit.nn import GPT
from gistkit_lab.released import reference_encoder, reference_model
from gistkit_lab.vit import ViT
from tests.helpers.encodings import close

pytestmark = pytest.mark.usefixtures("double")
DIM, HEADS, LAYERS, HIDDEN = 128, 2, 2, 96
METHODS = {"sum": "attn_add", "mul": "attn_mul", "bias": "attn_scalar"}


def released_weights(axes, dim=64, digits=2, layers=2, out_dim=64):
    shapes = {
        "pos_of_seqpe_embed.weight": (digits * axes, dim),
        "token_of_seqpe_embed.weight": (10, dim),
        "cls_token_embed": (1, 1, dim),
        "layernorm.weight": (dim,),
        "layernorm.bias": (dim,),
        "out_proj.weight": (out_dim, dim),
        "out_proj.bias": (out_dim,),
    }
    if axes > 1:
        shapes["dim_token_embed"] = (axes, 1, dim)
    for i in range(layers):
        for name, inner, outer in (
            ("attn.c_attn", dim, 3 * dim),
            ("attn.c_proj", dim, dim),
            ("mlp.c_fc", dim, 4 * dim),
            ("mlp.c_proj", 4 * dim, dim),
        ):
            shapes[f"transformers.{i}.{name}.weight"] = (inner, outer)
            shapes[f"transformers.{i}.{name}.bias"] = (outer,)
        for name in ("layernorm_1", "layernorm_2"):
            shapes[f"transformers.{i}.{name}.weight"] = shapes[f"transformers.{i}.{name}.bias"] = (dim,)
    return {name: torch.randn(shape, dtype=torch.float64) * 0.2 for name, shape in shapes.items()}


def released_form(state, digits, axes, heads):
    """What that code computes of one row of digits, by its names."""
    dim = state["cls_token_embed"].shape[-1]
    x = state["token_of_seqpe_embed.weight"][digits] + state["pos_of_seqpe_embed.weight"]
    if axes > 1:
        x = x + state["dim_token_embed"].expand(-1, len(digits) // axes, -1).flatten(0, 1)
    x = torch.cat([x, state["cls_token_embed"][0]])
    for i in range(sum(name.endswith("mlp.c_fc.bias") for name in state)):
        layer = {
            k.removeprefix(f"transformers.{i}."): v for k, v in state.items() if k.startswith(f"transformers.{i}.")
        }

        def conv(name, y, layer=layer):
            return y @ layer[f"{name}.weight"] + layer[f"{name}.bias"]

        y = F.layer_norm(x, (dim,), layer["layernorm_1.weight"], layer["layernorm_1.bias"])
        q, k, v = (t.view(len(x), heads, -1).transpose(0, 1) for t in conv("attn.c_attn", y).split(dim, -1))
        scores = q @ k.mT / math.sqrt(dim // heads)
        scores = scores + torch.triu(torch.full((len(x), len(x)), -torch.inf), 1)
        x = x + conv("attn.c_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        y = F.layer_norm(x, (dim,), layer["layernorm_2.weight"], layer["layernorm_2.bias"])
        x = x + conv("mlp.c_proj", F.gelu(conv("mlp.c_fc", y), approximate="tanh"))
    x = F.layer_norm(x[-1], (dim,), state["layernorm.weight"], state["layernorm.bias"])
    return x @ state["out_proj.weight"].T + state["out_proj.bias"]


@pytest.mark.parametrize("axes", [1, 2])
def test_released_weights(axes):
    state = released_weights(axes, dim=128, out_dim=48)
    model = reference_encoder(state)
    assert (model.heads, model.axes, model.digits, model.out_dim, model.shared_places) == (2, axes, 2, 48, False)
    positions = torch.tensor([[7, 42][:axes], [90, 13][:axes]])
    digits = [[d for x in row for d in divmod(x, 10)] for row in positions.tolist()]
    right = torch.stack([released_form(state, row, axes, heads=2) for row in digits])
    torch.testing.assert_close(model(positions if axes > 1 else positions[:, 0]), right, rtol=1e-10, atol=1e-10)


def test_released_weights_that_are_missing_or_of_another_shape():
    state = released_weights(1)
    with pytest.raises(ValueError, match=r"state: expected a weight 'token_of_seqpe_embed\.weight', got 0 others"):
        reference_encoder({})
    state["transformers.1.mlp.c_fc.weight"] = torch.ones(64, 63)
    with pytest.raises(ValueError, match=r"state: expected \[256, 64\] for blocks\.1\.up\.weight"):
        reference_encoder(state)
    state["transformers.1.mlp.c_fc.weight"] = torch.ones(64, 256, 1)
    with pytest.raises(ValueError, match=r"state: expected \[256, 64\] for blocks\.1\.up\.weight"):
        reference_encoder(state)


def pair(name: str, *shape: int) -> dict[str, Tensor]:
    bias = shape[-1] if len(shape) == 1 or name.split(".")[-1].startswith("c_") else shape[0]
    return {f"{name}.weight": torch.randn(shape) * 0.2, f"{name}.bias": torch.randn(bias) * 0.2}


def text_state(qk: str, prefix: str = "transformer.") -> dict[str, Tensor]:
    state = {"wte.weight": torch.randn(30, DIM) * 0.2} | pair("ln_f", DIM)
    for i in range(LAYERS):
        state |= pair(f"h.{i}.ln_1", DIM) | pair(f"h.{i}.ln_2", DIM) | pair(f"h.{i}.attn.c_attn", DIM, 3 * DIM)
        state |= pair(f"h.{i}.attn.c_proj", DIM, DIM) | pair(f"h.{i}.mlp.c_fc", DIM, HIDDEN)
        state |= pair(f"h.{i}.mlp.c_proj", HIDDEN, DIM) | (
            pair(f"h.{i}.attn.pe_qk", 2 * DIM, DIM) if qk == "multi" else {}
        )
    state |= pair("pe_qk", 2 * DIM, DIM) if qk == "single" else {}
    return {prefix + name: tensor for name, tensor in state.items()}


def image_state(qk: str) -> dict[str, Tensor]:
    state = pair("patch_embed.proj", DIM, 3, 4, 4) | pair("norm", DIM) | pair("head", 7, DIM)
    state |= {"cls_token": torch.randn(1, 1, DIM), "cls_token_pos_embed": torch.randn(1, 1, DIM)}
    for i in range(LAYERS):
        state |= pair(f"blocks.{i}.norm1", DIM) | pair(f"blocks.{i}.norm2", DIM)
        state |= pair(f"blocks.{i}.attn.qkv", 3 * DIM, DIM) | pair(f"blocks.{i}.attn.proj", DIM, DIM)
        state |= pair(f"blocks.{i}.mlp.fc1", HIDDEN, DIM) | pair(f"blocks.{i}.mlp.fc2", DIM, HIDDEN)
        state |= pair(f"blocks.{i}.attn.pe_qk", 2 * DIM, DIM) if qk == "multi" else {}
    return state | (pair("pe_qk", 2 * DIM, DIM) if qk == "single" else {})


def embeddings(state: dict[str, Tensor], positions: list[tuple[int, ...]]) -> Tensor:
    digits = [[digit for x in row for digit in divmod(x, 10)] for row in positions]
    return torch.stack([released_form(state, row, len(positions[0]), heads=2) for row in digits])


def attended(qkv: Tensor, e: Tensor, method: str, visible: Tensor) -> Tensor:
    """[B, N, dim] of queries, keys and values side by side, with e [N, 2 dim], those of queries first."""
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    e_q, e_k = (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in e.chunk(2, -1))
    scores = torch.zeros(())
    if method == "attn_mul":
        q, k = q * e_q, k * e_k
    elif method == "attn_add":
        q, k = q + e_q, k + e_k
    else:
        scores = e_q @ e_k.mT
    scores = (q @ k.mT + scores) / math.sqrt(DIM // HEADS)
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def projected(state: dict[str, Tensor], e: Tensor, qk: str, layer: str) -> Tensor:
    if qk == "none":
        return torch.cat([e, e], -1)
    name = "pe_qk" if qk == "single" else f"{layer}.attn.pe_qk"
    return F.linear(e, state[f"{name}.weight"], state[f"{name}.bias"])


def normed(state: dict[str, Tensor], x: Tensor, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, (DIM,), state[f"{name}.weight"], state[f"{name}.bias"], eps)


def text_form(state: dict[str, Tensor], encoder: dict[str, Tensor], ids: Tensor, qk: str, method: str) -> Tensor:
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    conv = lambda x, name: x @ state[f"{name}.weight"] + state[f"{name}.bias"]  # noqa: E731
    e, x = embeddings(encoder, [(i,) for i in range(ids.shape[1])]), state["wte.weight"][ids]
    visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    for i in range(LAYERS):
        h = f"h.{i}"
        qkv = conv(normed(state, x, f"{h}.ln_1", 1e-5), f"{h}.attn.c_attn")
        x = x + conv(attended(qkv, projected(state, e, qk, h), method, visible), f"{h}.attn.c_proj")
        inner = F.gelu(conv(normed(state, x, f"{h}.ln_2", 1e-5), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + conv(inner, f"{h}.mlp.c_proj")
    return normed(state, x, "ln_f", 1e-5) @ state["wte.weight"].T


def image_form(state: dict[str, Tensor], encoder: dict[str, Tensor], pixels: Tensor, qk: str, method: str) -> Tensor:
    linear = lambda x, name: F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])  # noqa: E731
    x = F.conv2d(pixels, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=4)
    places = [(row, column) for row in range(x.shape[2]) for column in range(x.shape[3])]
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
    e = torch.cat([state["cls_token_pos_embed"][0], embeddings(encoder, places)])
    for i in range(LAYERS):
        b = f"blocks.{i}"
        qkv = linear(normed(state, x, f"{b}.norm1", 1e-6), f"{b}.attn.qkv")
        mixed = attended(qkv, projected(state, e, qk, b), method, torch.ones(1, dtype=torch.bool))
        x = x + linear(mixed, f"{b}.attn.proj")
        x = x + linear(F.gelu(linear(normed(state, x, f"{b}.norm2", 1e-6), f"{b}.mlp.fc1")), f"{b}.mlp.fc2")
    return linear(normed(state, x[:, 0], "norm", 1e-6), "head")


FORMS = [("single", "bias"), ("multi", "mul"), ("none", "sum")]


@pytest.mark.parametrize(("qk", "integration"), FORMS)
def test_a_language_model(qk: str, integration: Any) -> None:
    state, encoder, ids = text_state(qk), released_weights(1, dim=128, out_dim=DIM), torch.randint(30, (2, 12))
    expected = text_form(state, encoder, ids, qk, METHODS[integration])
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(LAYERS)}
    model = reference_model(state | masks | {"lm_head.weight": state["transformer.wte.weight"]}, encoder, integration)
    assert isinstance(model, GPT) and not model.training
    close(model(ids), expected)
    # Its encoding in transformers' own GPT-2.
    config = GPT2Config(vocab_size=30, n_positions=4, n_embd=DIM, n_layer=LAYERS, n_head=HEADS, n_inner=HIDDEN)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(state, strict=False)
    with hf.encode_positions(theirs, model.position):
        close(theirs(ids).logits, expected)


@pytest.mark.parametrize(("qk", "integration"), FORMS)
def test_a_vision_transformer(qk: str, integration: Any) -> None:
    state, encoder, pixels = image_state(qk), released_weights(2, dim=128, out_dim=DIM), torch.randn(2, 3, 12, 20)
    model = reference_model(state, encoder, integration)
    assert isinstance(model, ViT)
    close(model(pixels), image_form(state, encoder, pixels, qk, METHODS[integration]))


def test_what_is_refused() -> None:
    state, encoder = text_state("single"), released_weights(1, dim=128, out_dim=DIM)
    with pytest.raises(ValueError, match="integration: expected sum, mul, bias, got 'attn_scalar'"):
        reference_model(state, encoder, "attn_scalar")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected the weights of a model with SeqPE, got others too: wpe\.weight"):
        reference_model(state | {"transformer.wpe.weight": torch.ones(4, DIM)}, encoder, "bias")
    missing = {name: tensor for name, tensor in state.items() if "h.1.ln_2" not in name}
    with pytest.raises(ValueError, match=r"state: expected a weight 'h\.1\.ln_2\.weight', got 27 others"):
        reference_model(missing, encoder, "bias")
    # One head's positions for all of them.
    narrow = state | {f"transformer.{name}": tensor for name, tensor in pair("pe_qk", 128, 64).items()}
    with pytest.raises(ValueError, match=r"state: expected \[256, 64\] for position\.projections\.0\.weight"):
        reference_model(narrow, released_weights(1, dim=128, out_dim=64), "bias")
    images = {name: tensor for name, tensor in image_state("multi").items() if "pos_embed" not in name}
    with pytest.raises(ValueError, match="state: expected a weight 'cls_token_pos_embed'"):
        reference_model(images, released_weights(2, dim=128, out_dim=DIM), "mul")
