"""LoRA configuration of a compressor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gistkit.common.checks import POSITIONS, check_bool, check_int
from gistkit.common.messages import shown
from gistkit.hf.attach import decoder_of

if TYPE_CHECKING:
    from peft import LoraConfig

Maps = Literal["query_value", "query_key_value", "all"]


# Fields of a LoraConfig that every pass honours, and those that say nothing of what an adapter computes.
HONOURED = frozenset({
    "r", "lora_alpha", "lora_dropout", "lora_bias", "target_modules", "exclude_modules", "modules_to_save",
    "fan_in_fan_out", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "ensure_weight_tying", "task_type",
})  # fmt: skip
NEUTRAL = frozenset({
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "megatron_core", "qalora_group_size", "eva_config",
})  # fmt: skip


def not_honoured(fields: Mapping[str, Any]) -> str | None:
    """The first field of a LoraConfig that is set but unsupported in a compressor, with its value."""
    from peft import LoraConfig

    defaults = vars(LoraConfig())
    for name, value in fields.items():
        if name not in HONOURED | NEUTRAL and value and value != defaults.get(name):
            return f"{shown(name)}={shown(value)}"
    return None


def check_honoured(config: LoraConfig) -> None:
    """Refuses a configuration that is not plain LoRA, or that changes the base model itself."""
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        raise ValueError(f"lora: expected a start that does not change the base model, got init_lora_weights {start!r}")
    if (field := not_honoured(vars(config))) is not None:
        raise ValueError(f"lora: expected plain LoRA, got {field}")


def adapter_config(
    model: PreTrainedModel,
    lora: int | LoraConfig | None,
    maps: Maps = "query_value",
    *,
    embedding_lora: int | None = None,
    train_norms: bool = False,
) -> LoraConfig | None:
    """The LoRA configuration for a compressor's `lora`: a rank, a configuration, or None.

    `maps`, `embedding_lora` and `train_norms`, as in `lora_config`, need a rank.
    """
    if isinstance(lora, bool) or not (lora is None or isinstance(lora, int) or hasattr(lora, "init_lora_weights")):
        raise TypeError(f"lora: expected a rank, a peft.LoraConfig or None, got {lora!r}")
    check_bool("train_norms", train_norms)
    if embedding_lora is not None:
        embedding_lora = check_int("embedding_lora", embedding_lora, high=POSITIONS)
    if isinstance(lora, int):
        if not isinstance(model, nn.Module):
            return None
        return lora_config(model, lora, maps, embedding_lora=embedding_lora, train_norms=train_norms)
    others = (("embedding_lora", embedding_lora, "target_modules and rank_pattern"),
              ("train_norms", train_norms or None, "modules_to_save"))  # fmt: skip
    for name, value, fields in others:
        if value is not None:
            reason = (
                "lora=None, which trains all weights" if lora is None else f"a LoraConfig, which sets it by {fields}"
            )
            raise ValueError(f"{name}: expected it only with a rank for lora, not with {reason}, got {value}")
    # PEFT writes into its arguments.
    return copy.deepcopy(lora)


def lora_config(
    model: PreTrainedModel,
    rank: int,
    maps: Maps = "query_value",
    *,
    embedding_lora: int | None = None,
    train_norms: bool = False,
) -> LoraConfig:
    """LoRA on linear maps of the decoder layers, with alpha 2 rank.

    More Effective LLM Compressed Tokens, Section 3, trains rank 16 on linear maps, rank 128 on the embeddings, and the
    norms.

    Args:
        maps: "query_value", the projections that Position IDs Matter trains in its encoders; "query_key_value", three
            of attention's projections, as many weights as Dodo's Table 5 counts; "all", for fine-tuning the whole
            model.
        embedding_lora: rank of LoRA on the input embedding, with alpha twice that rank; None: no LoRA there. An output
            embedding that is tied to it stays as it is: PEFT adds to what is looked up, not to the table.
        train_norms: the role's own copies of the decoder's norms train, as PEFT's modules_to_save: those of hidden
            states, not those of single heads' queries and keys.

    Raises:
        ValueError: if the rank is below 1, no projection of the model has a known name, or no norm has weights.
    """
    from peft import LoraConfig

    if not 1 <= rank < POSITIONS:
        raise ValueError(f"lora: expected a rank >= 1, got {rank}")
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    more: dict[str, Any] = {}
    embedding: list[str] = []
    if embedding_lora is not None:
        embedding = [name for name, module in model.named_modules() if module is model.get_input_embeddings()][:1]
        more |= {
            "rank_pattern": dict.fromkeys(embedding, embedding_lora),
            "alpha_pattern": dict.fromkeys(embedding, 2 * embedding_lora),
        }
    if train_norms:
        more["modules_to_save"] = norms_of(model)
        if not more["modules_to_save"]:
            raise ValueError(f"train_norms: expected a model whose norms have weights, got {type(model).__name__}")
    if maps == "all":
        every = _of_decoder(model, "all-linear")
        if embedding or not isinstance(model, PreTrainedModel):
            # PEFT's all-linear has no embeddings, and leaves out the head only in transformers' models.
            every = [*maps_of(model, decoder_of(model)), *embedding]
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=every, fan_in_fan_out=transposed, **more)
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
    chosen = [*_of_decoder(model, targets), *embedding]
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=chosen, fan_in_fan_out=transposed, **more)


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


def embedding_scale(embed: nn.Module) -> float:
    """The factor of a model's embeddings, as its first layer reads them."""
    plain = plain_map(embed)
    scale = getattr(plain, "embed_scale", 1.0)
    # Gemma's tensor has no value on "meta".
    return float(plain.scalar_embed_scale if isinstance(scale, Tensor) and scale.is_meta else scale)


def linear_maps(decoder: nn.Module) -> dict[str, nn.Module]:
    """The modules that map linearly, with the adapters around them where there are any."""
    maps: dict[str, nn.Module] = {}
    last = "no module's name"
    for name, module in decoder.named_modules():
        # PEFT's wrapper of a map comes before the map and before the adapter's own maps.
        if not name.startswith(f"{last}.") and isinstance(plain_map(module), nn.Linear | Conv1D):
            maps[name], last = module, name
    return maps


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Inside, an error leaves the model's modules, their attributes and requires_grad as they were before."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    attributes = [
        (vars(module), {**vars(module)}, [(v, v.copy()) for v in vars(module).values() if isinstance(v, dict)])
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        for now, before, tables in attributes:
            now.clear()
            now.update(before)
            for table, content in tables:
                table.clear()
                table.update(content)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        raise


def norms_of(model: nn.Module) -> list[str]:
    """The names in `model` of its decoder's norms of hidden states that have weights, with PEFT's copies or without."""
    width = (cast(Any, model).config.get_text_config().hidden_size,)
    parts, names, last = {*decoder_of(model).modules()}, [], "no module's name"
    for name, module in model.named_modules():
        plain = getattr(module, "original_module", module)
        if module in parts and not name.startswith(f"{last}.") and is_norm(plain) and plain.weight.shape == width:
            names.append(name)
            last = name
    return names


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with a weight for each feature."""
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.dim() == 1


def keep_wide(norm: nn.Module) -> None:
    """Gives a norm weights of at least float32, in which steps are not rounded away; it returns its input's dtype."""
    norm.to(torch.promote_types(cast(Tensor, norm.weight).dtype, torch.float32))
    vars(norm)["forward"] = partial(_wide, norm)


def _wide(norm: Any, x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, norm.weight.dtype))
    return type(norm).forward(norm, wide).to(x.dtype)  # type: ignore[no-any-return]
