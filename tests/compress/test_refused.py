"""Wrong settings of every method: an error that names the setting, and a model that stays as it was."""

from dataclasses import fields
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from torch import nn

from gistkit.compress import METHODS
from tests.helpers.models import tiny_llama
from tests.helpers.vision import IMAGE, tiny_vision

NAN, INF = float("nan"), float("inf")
BASE = {"dodo": {"layer": 1}, "kv_distill": {"layer": 1}, "sac": {"chunk": 12, "ratio": 4}}
# The dict of `lora` is a LoraConfig's.
VALUES = {
    "icae": [
        ({"chunk": 0}, "chunk: expected a whole number >= 1, got 0"),
        ({"ratio": 0.5}, "ratio: expected a number >= 1, got 0.5"),
        ({"ratio": NAN}, "ratio: expected a number >= 1, got nan"),
        ({"ratio": INF}, "ratio: expected a number >= 1, got inf"),
        ({"ratio": "5"}, "ratio: expected a number >= 1, got '5'"),
        ({"ratio": 4}, "ratio: expected one that divides chunk 510 into whole memory tokens, such as 3 or 5, got 4"),
        ({"losses": ("ae", "bleu")}, r"losses: expected some of ae, .*, hidden, got \('ae', 'bleu'\)"),
        ({"losses": None}, "losses: expected some of"),
        ({"losses": {"ae": 0.0}}, r"losses: expected weights > 0, got \{'ae': 0.0\}"),
        ({"losses": {"ae": "1"}}, "losses: expected weights > 0"),
        ({"losses": {"ae": INF}}, "losses: expected weights > 0"),
        ({"layout": "EPL"}, "layout: expected one of dpl, upl, cpl, epl, got 'EPL'"),
        ({"window": 0}, "window: expected a whole number >= 1, got 0"),
        ({"end_token": 50}, r"end_token: expected a token id in \[0, 50\), got 50"),
        ({"end_token": 2.5}, "end_token: expected a token id"),
        ({"lora": 0}, "lora: expected a rank >= 1, got 0"),
        ({"lora": None, "shared_lora": True}, "shared_lora: expected False without LoRA"),
        ({"lora": None, "embedding_lora": 5}, r"embedding_lora: expected it only with a rank .* lora=None"),
        (
            {"lora": {"target_modules": ["q_proj", "lm_head"]}},
            "no adapter on the output embedding, .* got one on lm_head",
        ),
    ],
    "x500": [
        ({"embedding_lora": 0}, r"embedding_lora: expected a whole number >= 1.*got 0"),
        ({"lora": {"bias": "lora_only"}}, "lora: expected plain LoRA, got bias="),
        ({"lora": {"alora_invocation_tokens": [5]}}, "lora: expected plain LoRA, got alora_invocation_tokens="),
        ({"lora": {"layer_replication": [(0, 2), (0, 2)]}}, "lora: expected plain LoRA, got layer_replication="),
        ({"lora": {"trainable_token_indices": [5]}}, "lora: expected plain LoRA, got trainable_token_indices="),
        ({"lora": {"target_parameters": ["weight"]}}, "lora: expected plain LoRA, got target_parameters="),
        ({"lora": {"use_dora": True}}, "lora: expected plain LoRA, got use_dora="),
        ({"lora": {"use_qalora": True}}, "lora: expected plain LoRA, got use_qalora="),
    ],
    "gist": [
        ({"ratio": 2.5}, "ratio: expected a whole number >= 1, got 2.5"),
        ({"copy_norms": True, "lora": None}, "copy_norms: expected gists with copied maps .full_copy=True"),
        ({"full_copy": True}, "full_copy: expected separate=True with it, got separate=False"),
        ({"bos_token": None}, "bos_token: expected a token id, because the model's configuration"),
        ({"bos_token": 50}, r"bos_token: expected a token id in \[0, 50\), got 50"),
        ({"lora": {}, "embedding_lora": 5}, r"embedding_lora: .* LoraConfig, .* by target_modules"),
        ({"lora": {}, "train_norms": True}, r"train_norms: .* sets it by modules_to_save, got True"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "no adapter on the output embedding, .* got one on lm_head"),
    ],
    "gistpool": [
        ({"windows": 0}, "windows: expected a whole number >= 1, got 0"),
        ({"windows": "4"}, "windows: expected a whole number >= 1, got '4'"),
        ({"window": 4}, "window: expected at least the ratio, 5 tokens, got 4"),
        ({"copy_norms": True, "lora": 2}, "with LoRA, train_norms gives gists their own norms"),
        (
            {"lora": {"init_lora_weights": "pissa"}},
            "lora: expected a start that does not .* got .*pissa",
        ),
        ({"lora": {"modules_to_save": ["embed_tokens"]}}, "lora: expected plain LoRA"),
        ({"lora": {"modules_to_save": ["mlp"]}}, r"lora: expected plain LoRA .* that are norms .* got ModulesToSave"),
        (
            {"lora": {"modules_to_save": ["mlp"]}, "full_copy": True},
            r"lora: expected no modules_to_save of linear .*, got \['mlp'\]",
        ),
    ],
    "avgpool": [
        ({"pool": "max"}, "pool: expected one of hidden, kv, got 'max'"),
        ({"losses": ("compression",)}, "losses: expected some of ae, lm, qa, kl, reverse_kl, hidden for avgpool"),
        ({"losses": ("kl",), "lora": None}, "losses: expected LoRA with 'kl'"),
    ],
    "dodo": [
        ({"selection": "best"}, "selection: expected one of learned, strided, .*, got 'best'"),
        ({"layer": 0}, "layer: expected a whole number >= 1"),
        ({"layer": 3}, "layer: expected 1 to 2, got 3"),
        ({"threshold": "0.5"}, "threshold: expected a number or None, got '0.5'"),
        ({"threshold": NAN}, "threshold: expected a number or None, got nan"),
        ({"delimiters": [3]}, "delimiters: expected token ids only for selection='delimiters'"),
        ({"selection": "delimiters"}, "delimiters: expected token ids only for selection='delimiters'"),
        ({"lora": None, "train_norms": True}, r"train_norms: expected it only with a rank .* got True"),
    ],
    "kv_distill": [({"lora": None}, "lora: expected a rank")],
    "sac": [
        ({"layout": "dpl"}, "layout: expected one of epl"),
        ({"ratio": 2.4}, "ratio: expected a whole number, as anchors are tokens, got 2.4"),
    ],
    "separate_encoder": [
        ({"pool": "max"}, "pool: expected one of means, tokens, got 'max'"),
        ({"layout": "upl"}, "layout: expected one of dpl, epl, got 'upl'"),
        ({"lora": None}, "lora: expected a rank if the model itself encodes"),
        ({"encoder": "no/such/model"}, "encoder: expected a decoder model that transformers can load"),
    ],
    "select": [
        ({"by": "best"}, "by: expected one of kvzip, .* got 'best'"),
        ({"by": {"name": "snapkv", "width": 3}}, "by: expected arguments of snapkv, got .*width"),
        ({"by": 3}, "by: expected one of"),
        ({"positions": "both"}, "positions: expected one of kept, closed, got 'both'"),
        ({"budget": 0}, "budget: expected"),
        ({"by": "even", "question": "Who?"}, "question: expected by kvzip, snapkv, which reads it, got by even"),
        ({"shares": "layers"}, "shares: expected one of equal, heads, all, pyramid, got 'layers'"),
        ({"question": ""}, "question: expected a text, got ''"),
        ({"losses": ("kl",)}, "losses: expected LoRA with 'kl'"),
        ({"own_reader": True}, "lora: expected a rank or a peft.LoraConfig with own_reader, got None"),
    ],
    "voco": [
        ({"memory_tokens": 0}, "memory_tokens: expected a whole number >= 1, got 0"),
        ({"layout": "abc"}, "layout: expected one of dpl, upl, cpl, epl, got 'abc'"),
        ({"gap": -1}, "gap: expected a whole number >= 0, got -1"),
        ({"separators": [3, IMAGE]}, "separators: expected token ids other than the image token's, 55"),
        ({"separators": 3}, "separators: expected token ids .* got 3"),
        ({"losses": ("ae",)}, "losses: expected some of lm, qa for voco, got ae"),
        ({"family": "gemma3", "gap": 1}, "gap: expected none for gemma3, whose image tokens see each other, got 1"),
        ({"family": "gemma3", "separators": [3]}, "separators: expected none for gemma3"),
    ],
}
TYPES = {
    "icae": [
        ({"lora": "128"}, "lora: expected a rank, a peft.LoraConfig or None, got '128'"),
        ({"match_embeddings": 1}, "match_embeddings: expected True or False, got 1"),
    ],
    "gistpool": [({"full_copy": "yes"}, "full_copy: expected True or False, got 'yes'")],
    "kv_distill": [({"separate": False}, "separate: expected some of")],
    "no_context": [({"window": 3}, "window: expected some of bos_token, .*, losses, train_norms, got window")],
    "separate_encoder": [
        ({"encoder": nn.Linear(2, 2)}, "encoder: expected a transformers"),
        ({"encoder": 7}, "encoder: expected a model or its name, got int"),
    ],
}
CASES = [
    pytest.param(error, method, settings, message, id=f"{method} {settings}")
    for error, table in ((ValueError, VALUES), (TypeError, TYPES))
    for method, rows in table.items()
    for settings, message in rows
]


def state(model):
    """All that a constructor may change in a model, but for the values of its weights."""
    modules = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    ranks = {name: sorted(getattr(module, "lora_alpha", ())) for name, module in model.named_modules()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return modules, ranks, trained, sorted(getattr(model, "peft_config", None) or {})


@pytest.mark.parametrize(("error", "method", "settings", "message"), CASES)
def test_wrong_settings_are_named_and_leave_the_model_as_it_was(error, method, settings, message):
    kind, settings = METHODS[method], BASE.get(method, {}) | settings
    model = tiny_vision(settings.pop("family", "llava")) if method == "voco" else tiny_llama()
    if isinstance(settings.get("lora"), dict):
        settings["lora"] = LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | settings["lora"])
    if any(field.name == "bos_token" for field in fields(kind.config_class)):
        settings = {"bos_token": 1} | settings
    before, weights = state(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(error, match=message):
        kind(model, **settings)
    assert state(model) == before
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("method", ["gistpool", "dodo"])
def test_parts_that_cannot_be_made_leave_the_model_as_it_was(method, monkeypatch):
    kind, model = METHODS[method], tiny_llama()
    before = state(model)
    # As of more gists than there is memory for.
    monkeypatch.setattr(kind.config_class, "parts", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        kind(model, bos_token=1, lora=2, **BASE.get(method, {}))
    assert state(model) == before
