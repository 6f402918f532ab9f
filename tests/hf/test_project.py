"""Keys of hidden states that no token has: families whose attention is not a Llama's, against their formulas."""

import pytest
import torch
import transformers

from gistkit import hf
from gistkit.compress import AvgPool, Compressive, GistPool
from gistkit.hf.attach import probed
from tests.helpers.families import tiny_of
from tests.helpers.models import COMMON
from tests.helpers.tiers import slow, tiers

BOS, RATIO, LENGTH = 1, 3, 8
IDS = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(4))


def angles(decoder, positions, interleaved=False):
    spread = positions[:, None] * decoder.rotary_emb.inv_freq.double()
    return spread.repeat_interleave(2, -1) if interleaved else torch.cat([spread, spread], -1)


def rotated(key, angle, interleaved=False):
    """key [H, K, D], of which the first dimensions turn by angle [K, R]."""
    turning, rest = key[..., : angle.shape[-1]], key[..., angle.shape[-1] :]
    if interleaved:
        other = torch.stack([-turning[..., 1::2], turning[..., ::2]], -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    return torch.cat([turning * angle.cos() + other * angle.sin(), rest], -1)


def heads(x, count):
    return x.view(x.shape[0], count, -1).transpose(0, 1)


def olmo2(decoder, layer, x, positions):
    attention, count = layer.self_attn, decoder.config.num_key_value_heads
    key = heads(attention.k_norm(attention.k_proj(x)), count)
    return rotated(key, angles(decoder, positions)), heads(attention.v_proj(x), count)


def cohere(decoder, layer, x, positions):
    attention, count, x = layer.self_attn, decoder.config.num_key_value_heads, layer.input_layernorm(x)
    key = heads(attention.k_proj(x), count)
    return rotated(key, angles(decoder, positions, True), True), heads(attention.v_proj(x), count)


def gpt_neox(decoder, layer, x, positions):
    count = decoder.config.num_attention_heads
    _, key, value = heads(layer.attention.query_key_value(layer.input_layernorm(x)), count).chunk(3, -1)
    return rotated(key, angles(decoder, positions)), value


def gpt2(decoder, layer, x, positions):
    _, key, value = layer.attn.c_attn(layer.ln_1(x)).chunk(3, -1)
    count = decoder.config.num_attention_heads
    return heads(key, count), heads(value, count)


def phi3(decoder, layer, x, positions):
    attention, config = layer.self_attn, decoder.config
    width = config.num_key_value_heads * attention.head_dim
    _, key, value = attention.qkv_proj(layer.input_layernorm(x)).split(
        [config.num_attention_heads * attention.head_dim, width, width], -1
    )
    key, value = (heads(part, config.num_key_value_heads) for part in (key, value))
    return rotated(key, angles(decoder, positions)), value


def smollm3(decoder, layer, x, positions):
    attention, count, x = layer.self_attn, decoder.config.num_key_value_heads, layer.input_layernorm(x)
    key = heads(attention.k_proj(x), count)
    turns = decoder.config.no_rope_layers[attention.layer_idx]
    return rotated(key, angles(decoder, positions)) if turns else key, heads(attention.v_proj(x), count)


FORMULAS = {
    "Olmo2ForCausalLM": olmo2,
    "CohereForCausalLM": cohere,
    "GPTNeoXForCausalLM": gpt_neox,
    "GPT2LMHeadModel": gpt2,
    "Phi3ForCausalLM": phi3,
    "SmolLM3ForCausalLM": smollm3,
}


@pytest.mark.parametrize("name", tiers(FORMULAS, ["CohereForCausalLM", "GPT2LMHeadModel"]))
@torch.no_grad()
def test_means_of_hidden_states(name):
    model = tiny_of(name).double()
    ids = torch.cat([torch.full((1, 1), BOS), IDS], 1)
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    memory = AvgPool(model, ratio=RATIO, lora=None, bos_token=BOS).eval().encode(IDS)
    windows = [range(first, min(first + RATIO, LENGTH + 1)) for first in range(1, LENGTH + 1, RATIO)]
    positions = torch.tensor([sum(window) / len(window) for window in windows], dtype=torch.float64)
    decoder = model.get_decoder()
    layers = next(child for child in decoder.children() if isinstance(child, torch.nn.ModuleList))
    for layer, entered, (key, value) in zip(layers, states, memory.layers, strict=False):
        means = torch.stack([entered[0, list(window)].mean(0) for window in windows])
        expected_key, expected_value = FORMULAS[name](decoder, layer, means, positions)
        # Rotation in the model itself is in single precision.
        torch.testing.assert_close(key[0, :, 1:], expected_key, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(value[0, :, 1:], expected_value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("GPTNeoXForCausalLM", False),
        ("NemotronForCausalLM", True),
        *slow(("Olmo2ForCausalLM", True)),
    ],
)
def test_gradients_of_offset_gists(name, checkpointing):
    # By finite differences along one direction, of the loss of a text that reads gists' outputs.
    model = tiny_of(name).double()
    compressor = GistPool(model, ratio=RATIO, lora=None, bos_token=BOS, separate=False, losses=("lm",)).train()
    if checkpointing:
        compressor.gradient_checkpointing_enable()
    loss = lambda: compressor(IDS, continuation_ids=IDS.flip(1))["loss"]  # noqa: E731
    trained = [parameter for _, parameter in compressor.trainable()]
    torch.manual_seed(0)
    loss().backward()
    directions = [torch.randn_like(p) for p in trained]
    slope = sum((p.grad * d).sum() for p, d in zip(trained, directions, strict=True) if p.grad is not None)
    # The loss is in single precision.
    values, step = [], 3e-4
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=sign * step)
            values.append(loss())
    assert slope.abs() > 1
    torch.testing.assert_close(slope.float(), (values[0] - values[1]) / (2 * step), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["Olmo2ForCausalLM", "GPT2LMHeadModel"])
@torch.no_grad()
def test_reading_on_with_hidden_means(name):
    reader = Compressive(AvgPool(tiny_of(name).double(), ratio=2, lora=None, bos_token=BOS).eval(), tau=4, segment=2)
    ids = torch.cat([IDS, IDS.flip(1)], 1)
    wanted = reader.hidden(reader.rows(ids))
    stream = reader.start(ids[:, :7])
    for at in range(7, ids.shape[1]):
        torch.testing.assert_close(stream.step(ids[:, at]), wanted[:, at + 1], rtol=1e-6, atol=1e-6)


def test_frequencies_that_depend_on_the_length_are_refused():
    config = transformers.CohereConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    model = transformers.CohereForCausalLM(config)
    assert "depend on the length" in probed(model).projects
    with pytest.raises(TypeError, match="model: expected layers that compute keys of any hidden states"):
        AvgPool(model, bos_token=BOS)
    with pytest.raises(TypeError, match="so that its keys can be rotated"):
        AvgPool(tiny_of("Olmo2ForCausalLM"), pool="kv", bos_token=BOS)
    assert hf.check_projects(tiny_of("Olmo2ForCausalLM")) is None
