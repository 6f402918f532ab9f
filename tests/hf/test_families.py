"""Every family on gistkit's attention: logits and gradients of the model's own, and that nothing stays behind."""

import pytest
import torch
import transformers

import gistkit
from gistkit.hf import ATTENTION_NAME, attach, sliding_windows
from tests.helpers.models import (
    COMMON,
    FAMILIES,
    OTHERS,
    checkpoint,
    double_angles,
    eager,
    masked_logits,
    tiny,
)
from tests.helpers.tiers import tiers

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
EVERY = [*FAMILIES, *OTHERS]
LENGTH = 13


def causal(length, model):
    return gistkit.layouts.causal(length).compile(windows=sliding_windows(model))


def tokens(batch, length=LENGTH):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", tiers(EVERY))
def test_causal_logits_equal_the_models_own(family):
    for training, batch in ((False, 1), (True, 2)):
        model = tiny(family).train(training)
        ids = tokens(batch)
        with eager(model):
            expected = model(ids, attention_mask=torch.ones_like(ids)).logits
        with double_angles(model), attach(model):
            torch.testing.assert_close(model(ids, plan=causal(LENGTH, model)).logits, expected, **TOLERANCE)
            torch.testing.assert_close(model(ids).logits, expected, **TOLERANCE)
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_types_equal_the_models_own(rope):
    parameters = rope | {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
    model = tiny("llama", rope_parameters=parameters, max_position_embeddings=8)
    ids = tokens(2)
    with torch.no_grad():
        # The first pass puts in place the frequencies of its length, which the oracle then takes.
        own = model(ids, use_cache=False).logits
        with double_angles(model):
            expected = model(ids, use_cache=False).logits
        with attach(model):
            ours = model(ids, use_cache=False).logits
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize("family", tiers(EVERY))
def test_disordered_position_ids_are_not_read_as_packed_sequences(family):
    positions = torch.tensor([1, 2, 3, 4, 5, 6, 2, 5, 0])[None]
    for training, batch in ((False, 1), (True, 2)):
        ids, where, model = tokens(batch, 9), positions.expand(batch, -1), tiny(family).train(training)
        layout = gistkit.layouts.causal(9)
        windows = sliding_windows(model)
        masks = [torch.from_numpy(layout.dense_mask(window=window)) for window in (None, *windows)]
        expected = masked_logits(model, ids, masks[0], where, masks[-1])
        with double_angles(model):
            trapped = model(ids, position_ids=where, use_cache=False).logits
        assert not torch.allclose(trapped, expected), "transformers no longer falls into this trap"
        with double_angles(model), attach(model):
            ours = model(ids, position_ids=where, plan=causal(9, model), use_cache=False).logits
        torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_no_pass_beyond_the_cpu_waits_to_look_for_packed_sequences(given):
    # The meta device has no values: whoever asks for one fails.
    model, ids = tiny("llama").to("meta"), tokens(1).to("meta")
    inputs = {given: ids if given == "input_ids" else model.get_input_embeddings()(ids)}

    def stop(*_):
        raise InterruptedError("the first layer is reached")

    model.model.layers[0].register_forward_pre_hook(stop)
    for of in (model, model.model):
        with attach(model), pytest.raises(InterruptedError):
            of(**inputs, plan=causal(ids.shape[1], model).to("meta"), use_cache=False)


@pytest.mark.parametrize("family", tiers(FAMILIES))
def test_gradients_equal_the_models_own(family):
    model = tiny(family).train()
    ids = tokens(2)
    with eager(model):
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.logsumexp(-1).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            checkpoint(model)
        with attach(model):
            model(ids, plan=causal(LENGTH, model), use_cache=False).logits.logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            # Gemma3's norms sum the gradients of their weights in single precision, in the order of the heads' memory.
            single = family == "gemma3" and name.endswith(("q_norm.weight", "k_norm.weight"))
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if single else TOLERANCE
            torch.testing.assert_close(parameter.grad, expected[name], **tolerance)


@pytest.mark.parametrize("family", tiers(EVERY))
def test_generate_follows_the_models_own(family):
    model = tiny(family)
    ids = tokens(2, 5)
    with eager(model):
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with attach(model):
        ours = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", tiers(FAMILIES))
def test_less_precision_is_as_good_as_the_models_own(family, precision):
    model = tiny(family)
    ids = tokens(4, 40)
    with eager(model):
        exact = model(ids, attention_mask=torch.ones_like(ids)).logits
    model = model.bfloat16() if precision == "bfloat16" else model.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        own = model(ids, attention_mask=torch.ones_like(ids)).logits
        with attach(model):
            found = [model(ids, plan=causal(40, model), use_cache=use_cache).logits for use_cache in (False, True)]
    for ours in found:
        assert ours.dtype == own.dtype
        assert (ours - exact).norm() <= 2 * (own - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("llama", "eager"),
        ("gpt2", "eager"),
        pytest.param("gemma3", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiles_without_a_graph_break(family, backend):
    model = tiny(family)
    ids = tokens(2, 8)
    plan = causal(8, model)
    with attach(model):
        expected = model(ids, plan=plan, use_cache=False).logits
        compiled = torch.compile(model.get_decoder(), fullgraph=True, backend=backend)
        hidden = compiled(ids, plan=plan, use_cache=False).last_hidden_state
        # Norms are single precision in every model, and compiled sums round differently.
        torch.testing.assert_close(model.lm_head(hidden), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", tiers(EVERY))
def test_nothing_stays_behind(family):
    model = tiny(family)
    ids = tokens(1, 7)
    before, name = model(ids).logits, model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), attach(model):
        with attach(model):
            pass
        assert model.config._attn_implementation == ATTENTION_NAME
        raise RuntimeError("inside")
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
        assert not hasattr(module, "config") or module.config._attn_implementation == name
    assert torch.equal(model(ids).logits, before)


def test_a_layer_with_a_forward_of_its_own_keeps_its_models_rope():
    from transformers.models.llama import modeling_llama

    class Own(modeling_llama.LlamaAttention):
        def forward(self, hidden_states, **kwargs):
            out, weights = super().forward(hidden_states, **kwargs)
            return 2 * out, weights

    model = tiny("llama")
    model.model.layers[1].self_attn.__class__ = Own
    ids = tokens(2)
    with eager(model):
        expected = model(ids, attention_mask=torch.ones_like(ids)).logits
    with attach(model), double_angles(model):
        torch.testing.assert_close(model(ids).logits, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("model", "config", "settings", "message"),
    [
        (
            "T5ForConditionalGeneration",
            "T5Config",
            {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2},
            "the encoder-decoder T5",
        ),
        ("BloomForCausalLM", "BloomConfig", {"n_head": 4, "n_layer": 1}, "BloomForCausalLM with attention of its own"),
        ("MambaForCausalLM", "MambaConfig", {"state_size": 4}, "MambaForCausalLM with attention of its own"),
        ("BertModel", "BertConfig", {}, "BertModel: its attention is not causal"),
        (
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            {"head_dim": 16, "use_bidirectional_attention": True},
            "is not causal or reads",
        ),
        (
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            {"num_local_experts": 1, "head_dim": 16},
            "with layers of chunked_attention",
        ),
    ],
)
def test_what_cannot_be_attached_is_said(model, config, settings, message):
    common = {key: value for key, value in COMMON.items() if key not in ("bos_token_id", "eos_token_id")}
    config = getattr(transformers, config)(**common | {"attn_implementation": "eager"} | settings)
    model = getattr(transformers, model)(config)
    with pytest.raises(TypeError, match=f"model: expected a transformers decoder.*got .*{message}"), attach(model):
        pass


def test_attention_of_another_kind_is_refused():
    model = tiny("phi3")
    with attach(model), pytest.raises(ValueError, match=r"got one with attention sinks \(s_aux\)"):
        model(tokens(1), s_aux=torch.zeros(4))


def test_a_table_of_positions_has_no_fractions():
    layout = gistkit.layouts.Layout(roles=[0, 0], positions=[0.0, 0.5], sees=gistkit.layouts.causal(2).sees)
    with attach(tiny("gpt2")) as model, pytest.raises(ValueError, match=r"plan: expected whole position IDs.*gpt2"):
        model(tokens(1, 2), plan=layout.compile())
    with attach(tiny("llama")) as model:
        assert model(tokens(1, 2), plan=layout.compile()).logits.isfinite().all()
