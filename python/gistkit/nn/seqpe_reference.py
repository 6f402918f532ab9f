"""Weights of SeqPE's released code, under the names and in the shapes of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from gistkit.nn.seqpe import SeqPE

Encoder = TypeVar("Encoder", bound="SeqPE")

_LAYER = "transformers."
# Ours: (theirs, whether theirs is transposed).
_BLOCK = {
    "norm_1": ("layernorm_1", False),
    "norm_2": ("layernorm_2", False),
    "qkv": ("attn.c_attn", True),
    "attention_out": ("attn.c_proj", True),
    "up": ("mlp.c_fc", True),
    "down": ("mlp.c_proj", True),
}


def from_reference(
    cls: type[Encoder], state: Mapping[str, Tensor], *, prefix: str = "", heads: int | None = None
) -> Encoder:
    """See `SeqPE.from_reference`."""

    def weight(name: str) -> Tensor:
        if prefix + name not in state:
            raise ValueError(f"state: expected a weight {prefix + name!r}, got {len(state)} others")
        return state[prefix + name].detach()

    tokens, places, out = (
        weight(f"{name}.weight") for name in ("token_of_seqpe_embed", "pos_of_seqpe_embed", "out_proj")
    )
    axes = len(weight("dim_token_embed")) if prefix + "dim_token_embed" in state else 1
    names = [name.removeprefix(prefix + _LAYER) for name in state if name.startswith(prefix + _LAYER)]
    layers = len({name.split(".")[0] for name in names})
    ours: dict[str, Tensor] = {"tokens": tokens, "places": places, "cls": weight("cls_token_embed").flatten()}
    if axes > 1:
        ours["dimensions"] = weight("dim_token_embed").flatten(1)
    pairs: list[tuple[str, str, bool]] = [("norm", "layernorm", False), ("out", "out_proj", False)]
    for i in range(layers):
        pairs += [(f"blocks.{i}.{mine}", f"{_LAYER}{i}.{name}", turned) for mine, (name, turned) in _BLOCK.items()]
    for mine, theirs, transposed in pairs:
        matrix = weight(f"{theirs}.weight")
        ours[f"{mine}.weight"] = matrix.T if transposed else matrix
        ours[f"{mine}.bias"] = weight(f"{theirs}.bias")
    sizes: dict[str, Any] = {"base": len(tokens), "digits": len(places) // axes, "axes": axes, "layers": layers}
    encoder = cls(tokens.shape[1], out_dim=len(out), heads=heads, shared_places=False, **sizes).to(tokens.dtype)
    for name, parameter in encoder.named_parameters():
        if parameter.shape != ours[name].shape:
            raise ValueError(
                f"state: expected {list(parameter.shape)} for {name}, as dim {encoder.dim}, {axes} axes and "
                f"{encoder.digits} digits imply, got {list(ours[name].shape)}"
            )
    encoder.load_state_dict(ours)
    return encoder
