"""small_copy: a decoder of the same class and configuration as a model, with tiny sizes and random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

WINDOW = 4
_HEADS, _HEAD_DIM = 4, 8
_WIDTH = _HEADS * _HEAD_DIM
_SEED = 11
# Sizes by the names that configurations give them. What is None, or not there, stays so.
_SIZES = {
    "vocab_size": 64,
    "hidden_size": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "embedding_size": _WIDTH,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "n_inner": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_attention_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "global_head_dim": 2 * _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
    "qk_nope_head_dim": _HEAD_DIM,
    "qk_rope_head_dim": _HEAD_DIM,
    "rotary_dim": _HEAD_DIM,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "laurel_rank": 4,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "max_position_embeddings": 256,
}
# What bounds values, with bounds that those of a small copy reach: a bound that nothing reaches shows no difference.
_BOUNDS = {"clip_qkv": 0.5, "attn_logit_softcapping": 1.0}
# What a pass returns, which a model's own configuration may have changed.
_OUTPUTS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
# Smaller values are kept.
_AT_MOST = ("num_experts_per_tok", "n_shared_experts", "sliding_window")


def small_config(config: Any) -> Any:
    """A copy of a decoder's configuration with tiny sizes, short windows and the first layers of every kind."""
    settings = config.to_dict()
    # Layers that differ from the others in size are written apart from what all share; by numbers such as "05".
    overrides = {int(index): values for index, values in (settings.get("per_layer_config") or {}).items()}
    small = type(config)(**settings | {"per_layer_config": {}}) if overrides else copy.deepcopy(config)
    layers = small.num_hidden_layers
    shared = getattr(small, "num_kv_shared_layers", None) or 0
    # Settings of each layer; two layers of which all are the same are of one kind.
    by_layer = {name: value for name, value in vars(small).items() if isinstance(value, list) and len(value) == layers}
    kept = _first_of_each(
        [(index >= layers - shared, *(str(value[index]) for value in by_layer.values())) for index in range(layers)]
    )
    for name, values in by_layer.items():
        setattr(small, name, [values[index] for index in kept])
    small.num_hidden_layers = len(kept)
    if shared:
        small.num_kv_shared_layers = sum(index >= layers - shared for index in kept)
    key_heads, heads = getattr(small, "num_key_value_heads", None), small.num_attention_heads
    for name, size in _SIZES.items():
        value = getattr(small, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            setattr(small, name, min(value, size) if name in _AT_MOST else size)
        elif isinstance(value, list) and name == "intermediate_size":
            setattr(small, name, [size for _ in value])
    for name, bound in _BOUNDS.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, bound)
    for name, value in _OUTPUTS.items():
        if hasattr(small, name):
            setattr(small, name, value)
    _shorten_rope(getattr(small, "rope_parameters", None))
    if isinstance(key_heads, int):
        small.num_key_value_heads = _HEADS if key_heads == heads else 1 if key_heads == 1 else 2
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    if overrides:
        sizes = {"head_dim": 2 * _HEAD_DIM, "num_key_value_heads": 2}
        small.per_layer_config = {
            place: {name: sizes.get(name, value) for name, value in overrides[index].items()}
            for place, index in enumerate(kept)
            if index in overrides
        }
    return small


def _shorten_rope(parameters: Any) -> None:
    """As many of longrope's factors, one for each frequency, as a small head has frequencies; as many frequencies for
    the axes of positions; and queries that are scaled by their positions within the few that a small copy reads."""
    if not isinstance(parameters, dict):
        return
    if isinstance(sections := parameters.get("mrope_section"), list):
        parameters["mrope_section"] = [_HEAD_DIM // 2 - len(sections) + 1] + [1] * (len(sections) - 1)
    if parameters.get("llama_4_scaling_beta") is not None:
        parameters["original_max_position_embeddings"] = WINDOW
    for name, value in parameters.items():
        if name in ("short_factor", "long_factor") and isinstance(value, list):
            count = int(_HEAD_DIM * (parameters.get("partial_rotary_factor") or 1.0)) // 2
            parameters[name] = value[:count]
        _shorten_rope(value)


def _first_of_each(kinds: list[Any]) -> list[int]:
    """The indices of the first two layers of each kind, in order."""
    seen: dict[Any, int] = {}
    kept = []
    for index, kind in enumerate(kinds):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            kept.append(index)
    return kept


def small_copy(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model of class `kind` on the CPU, fp32, in eval mode, whose weights all matter to its results.

    The caller's random numbers stay as they are.
    """
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(_SEED)
        model = kind(config).float().eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model
