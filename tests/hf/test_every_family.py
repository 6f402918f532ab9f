"""Every causal language model class of transformers: right against dense attention, or refused by name."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

from gistkit.compress import FiveHundredX, Gist
from gistkit.hf import attach, sliding_windows
from gistkit.hf.attach import _attached, probed
from gistkit.hf.parts import FAMILIES
from gistkit.hf.probe import Traits, probe
from gistkit.layouts import Layout, Role
from gistkit.layouts.relations import CAUSAL
from tests.helpers.families import classes, line, row, tiny_of
from tests.helpers.models import COMMON, checkpoint, tiny, tiny_llama
from tests.helpers.tiers import tiers

# A family whose layers drop the plan, one with windows in the mask alone, and one that is refused: two calls a layer.
QUICK = ["NemotronForCausalLM", "PhimoeForCausalLM", "DiffLlamaForCausalLM"]
# Each kind of attention once.
SAMPLE = {
    "SmolLM3ForCausalLM": "layers without RoPE",
    "PhiForCausalLM": "RoPE of some dimensions",
    "CohereForCausalLM": "interleaved RoPE",
    "GPT2LMHeadModel": "a table of positions",
    "GPTBigCodeForCausalLM": "one key head",
    "Gemma2ForCausalLM": "capped logits",
    "GptOssForCausalLM": "sinks",
    "HyperCLOVAXForCausalLM": "a factor of logits",
    "Gemma3nForCausalLM": "token ids beside embeddings",
    "Gemma4UnifiedForCausalLM": "layers unlike each other",
    "DeepseekV3ForCausalLM": "keys unlike values",
    "Lfm2ForCausalLM": "convolutions between",
}
TABLE = Path(__file__).parents[2] / "docs" / "families.md"


def tier(name):
    return () if name in QUICK else pytest.mark.slow if name in SAMPLE else pytest.mark.nightly


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier(name)) for name in sorted(classes())])
def test_right_or_refused_by_name(name):
    cells = row(name)
    if cells is None:
        pytest.skip("no tiny configuration builds it")
    assert not [cell for cell in cells.values() if cell.startswith("wrong")], cells
    table = TABLE.read_text()
    if f"of transformers {transformers.__version__} " not in table:
        pytest.skip("docs/families.md is of another transformers")
    assert line(name, cells) in table.splitlines(), "docs/families.md is old: python tools/families.py"


@pytest.mark.parametrize("name", tiers(["NemotronForCausalLM", "MixtralForCausalLM"], ["NemotronForCausalLM"]))
def test_gradients_under_checkpointing(name):
    # Layers that run again in the backward pass have their plan again.
    model = tiny_of(name).train()
    ids = torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(2))
    plan = documents_plan(8)
    found = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            checkpoint(model, use_reentrant=False)
        with attach(model):
            model(ids, plan=plan, use_cache=False).logits.logsumexp(-1).sum().backward()
        found.append({key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None})
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=1e-5)


def documents_plan(length):
    documents = [index // 4 for index in range(length)]
    return Layout(roles=[Role.TEXT] * length, documents=documents, sees={Role.TEXT: {Role.TEXT: CAUSAL}}).compile()


@pytest.mark.parametrize("name", ["PhimoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_windows_that_only_the_mask_knows(name):
    # By which the logits are right, as for every class.
    assert sliding_windows(tiny_of(name)) == (4,)


BOUNDED = {
    "Olmo": {"clip_qkv": 8.0},
    "VaultGemma": {"head_dim": 12, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 12},
    "Ministral3": {
        "head_dim": 12,
        "sliding_window": None,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", tiers(BOUNDED, ["Olmo", "Ministral3"]))
def test_what_only_large_values_and_far_positions_reach_is_not_lost(kind):
    config = getattr(transformers, f"{kind}Config")(**COMMON | BOUNDED[kind] | {"pad_token_id": 0})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(weight, std=2)
    ids = torch.randint(3, 60, (1, 200)) % config.vocab_size
    with torch.no_grad():
        own = model(ids, use_cache=False).logits
        with attach(model):
            ours = model(ids, use_cache=False).logits
    # Transformers rounds angles to float32, which such logits make ten times larger.
    assert (ours - own).abs().max() < 1e-3 * own.abs().max()


def test_a_refusal_ends_with_the_setting_that_caused_it():
    model = tiny_llama(hidden_size=40, num_attention_heads=5, num_key_value_heads=5)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="output_attentions: expected False"), attach(model):
        model(ids)
    model.config.output_attentions = False
    with attach(model):
        model(ids)
    # Transformers' own heads do not take tuples; decoders do.
    with attach(tiny_llama(return_dict=False)) as model:
        assert isinstance(model.model(ids), tuple)


def test_heads_that_are_too_wide_are_refused_before_a_pass():
    model = tiny_llama(head_dim=264)
    message = "model: expected .*got LlamaModel: its heads have 264 dimensions, more than 256"
    with pytest.raises(TypeError, match=message), attach(model):
        pass


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Gemma3nForCausalLM"])
def test_a_compressor_says_what_its_model_cannot_read(name):
    messages = {
        "DeepseekV3ForCausalLM": "keys and values of an earlier pass, as x500 does, .*its keys and values differ",
        "Gemma3nForCausalLM": "embeddings in place of tokens.*it reads token ids besides their embeddings",
    }
    with pytest.raises(TypeError, match=f"model: expected one that reads {messages[name]}"):
        FiveHundredX(tiny_of(name), chunk=6, ratio=3, lora=None)


def test_gists_cannot_have_experts_of_their_own():
    # Experts read the tokens of a batch in any order, where a slice of tokens is no slice of rows.
    with pytest.raises(TypeError, match="model: expected one whose linear maps gists can have copies of"):
        Gist(tiny_of("MixtralForCausalLM"), ratio=3, separate=True, lora=None, bos_token=1)


def test_the_probe_touches_nothing_of_the_caller():
    model = tiny("phi3", intermediate_size=72).train()
    hooks = []
    model.register_forward_hook(lambda *args: hooks.append(1))
    before = {name: module.training for name, module in model.named_modules()}
    states = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        traits = probed(model)
    assert torch.equal(torch.rand(3), expected)
    assert traits.refused is None and not hooks
    assert before == {name: module.training for name, module in model.named_modules()}
    assert all(torch.equal(weight, states[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_class_and_configuration_is_probed_once(monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return probe(*args)

    monkeypatch.setattr("gistkit.hf.probe.probe", counted)
    monkeypatch.setattr("gistkit.hf.probe._KNOWN", {})
    first, second = (tiny_of("OlmoForCausalLM") for _ in range(2))
    assert probed(first) is probed(second) is probed(first) and len(calls) == 1
    other = tiny_of("OlmoForCausalLM")
    other.config.hidden_size += 1
    assert isinstance(probed(other), Traits) and len(calls) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_a_probe_finds_out(family, monkeypatch):
    model = tiny(family)
    found = probe(type(model.model), model.config, _attached)
    monkeypatch.setattr("gistkit.hf.probe.probe", None)
    monkeypatch.setattr("gistkit.hf.probe._KNOWN", {})
    assert probed(model) == dataclasses.replace(found, windows=())
    assert sliding_windows(model) == found.windows
