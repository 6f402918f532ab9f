"""What of a model trains beside its frozen weights: the LoRA configuration of a compressor's arguments."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gistkit._checks import POSITIONS
from gistkit.hf.attach import decoder_of

if TYPE_CHECKING:
    from peft import LoraConfig

Maps = Literal["query_value", "query_key_value", "all"]


def adapter_config(
    model: PreTrainedModel, lora: int | LoraConfig | None, maps: Maps = "query_value"
) -> LoraConfig | None:
    """The LoRA configuration for a compressor's `lora`: a rank, a configuration, or None.

    `maps` selects the linear maps that get LoRA where `lora` is a rank.
    """
    if isinstance(lora, bool) or not (lora is None or isinstance(lora, int) or hasattr(lora, "init_lora_weights")):
        raise TypeError(f"lora: expected a rank, a peft.LoraConfig or None, got {lora!r}")
    if not isinstance(lora, int):
        # PEFT writes into its arguments.
        return copy.deepcopy(lora)
    if not isinstance(model, nn.Module):
        return None
    return lora_config(model, lora, maps)


def lora_config(model: PreTrainedModel, rank: int, maps: Maps = "query_value") -> LoraConfig:
    """LoRA on linear maps of the decoder layers, with alpha 2 rank.

    Args:
        maps: "query_value", the projections that Position IDs Matter trains in its encoders; "query_key_value", three
            of attention's projections, as many weights as Dodo's Table 5 counts; "all", for fine-tuning the whole
            model.

    Raises:
        ValueError: if the rank is below 1, or no projection of the model has a known name.
    """
    from peft import LoraConfig

    if not 1 <= rank < POSITIONS:
        raise ValueError(f"lora: expected a rank >= 1, got {rank}")
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    if maps == "all":
        every = _of_decoder(model, "all-linear")
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=every, fan_in_fan_out=transposed)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    projections = ["q_proj", "v_proj"] if maps == "query_value" else ["q_proj", "k_proj", "v_proj"]
    targets = next(
        (targets_of_family for targets_of_family in (projections, ["c_attn"]) if names >= set(targets_of_family)), None
    )
    if targets is None:
        raise ValueError(
            f"lora: expected a model with {' and '.join(projections)} (or c_attn), got {type(model).__name__}; "
            "pass a peft.LoraConfig with its target_modules"
        )
    transposed = targets == ["c_attn"]
    chosen = _of_decoder(model, targets)
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=chosen, fan_in_fan_out=transposed)


def _of_decoder(model: nn.Module, targets: str | list[str]) -> str | list[str]:
    """Target modules by the last part of their names; in a model that reads images too, the whole names of those in
    its decoder."""
    if not any(hasattr(module, "get_image_features") for module in model.modules()):
        return targets
    names = maps_of(model, decoder_of(model))
    return names if targets == "all-linear" else [name for name in names if name.rpartition(".")[2] in targets]


def maps_of(model: nn.Module, *parts: nn.Module) -> list[str]:
    """The names in `model` of the linear maps that some of its parts hold."""
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for part in parts for module in linear_maps(part).values()]


def plain_map(module: nn.Module) -> Any:
    """The linear map inside PEFT's adapter, or the module itself."""
    return getattr(module, "base_layer", module)


def linear_maps(decoder: nn.Module) -> dict[str, nn.Module]:
    """The modules that map linearly, with the adapters around them where there are any."""
    maps: dict[str, nn.Module] = {}
    last = "no module's name"
    for name, module in decoder.named_modules():
        # PEFT's wrapper of a map comes before the map and before the adapter's own maps.
        if not name.startswith(f"{last}.") and isinstance(plain_map(module), nn.Linear):
            maps[name], last = module, name
    return maps
