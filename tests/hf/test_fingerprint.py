"""Which model a memory was made with, and keys moved to other positions."""

import copy

import pytest
import torch

from gistkit import ops
from gistkit.compress import Select
from gistkit.hf import KeptKeys, attach, fingerprint, frequencies, structure
from tests.helpers.models import FAMILIES, tiny, tiny_llama
from tests.helpers.tiers import tiers


def test_structure_is_of_shapes_and_rope_alone():
    base = structure(tiny_llama())
    assert len(base) == 16 and int(base, 16) >= 0
    assert structure(tiny_llama(initializer_range=0.5)) == base
    assert structure(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 10000})) == base
    changed = [
        {"vocab_size": 51},
        {"hidden_size": 40, "head_dim": 12},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 2, "head_dim": 12},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ]
    others = [structure(tiny_llama(**change)) for change in changed]
    assert len({base, *others}) == len(changed) + 1
    assert len({structure(tiny(family)) for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("family", tiers(FAMILIES))
def test_fingerprints_of_one_checkpoint_agree_in_any_dtype(family):
    model = tiny(family).float()
    expected = fingerprint(model)
    assert expected.startswith(structure(model) + "-")
    assert fingerprint(copy.deepcopy(model)) == expected
    half = copy.deepcopy(model).bfloat16()
    assert fingerprint(half) == expected
    assert fingerprint(half.float()) == expected
    with attach(model):
        assert fingerprint(model) == expected


def test_fingerprints_differ_where_weights_do():
    model = tiny_llama().float()
    expected = fingerprint(model)
    seen = {expected}
    for _, weight in model.named_parameters():
        kept = weight.data.clone()
        weight.data *= 1.1
        seen.add(fingerprint(model))
        weight.data = kept
    assert fingerprint(model) == expected
    assert len(seen) == 1 + len(list(model.parameters()))


def test_samples_of_a_matrix_are_not_of_one_column():
    from gistkit.hf.fingerprint import _spread

    for rows, columns in ((32000, 2048), (49152, 576), (4096, 256)):
        index = _spread(rows * columns)
        assert len(index) == 256 and index.min() >= 0 and index.max() < rows * columns
        assert len(set((index % columns).tolist())) > 100 and len(set((index // columns).tolist())) > 100


def test_adapters_do_not_count():
    peft = pytest.importorskip("peft")
    model = tiny_llama().float()
    expected = fingerprint(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                weight.add_(1.0)
    assert fingerprint(wrapped) == expected and structure(wrapped) == structure(tiny_llama())


class Packed(torch.nn.Module):
    """A linear map as GPTQ and AWQ have it: eight rows of codes in an integer, and scales, all of them buffers."""

    def __init__(self, linear):
        super().__init__()
        codes = torch.randint(-(2**31), 2**31, (linear.in_features // 8, linear.out_features), dtype=torch.int32)
        self.register_buffer("qweight", codes)
        self.register_buffer("scales", torch.rand(1, linear.out_features))
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32)[None], persistent=False)

    def forward(self, x):
        codes = (self.qweight[:, None] >> self.shifts[0][:, None]) & 15
        return x @ ((codes.flatten(0, 1) - 7.5) * self.scales / 16).to(x.dtype)


def packed_llama():
    model = tiny_llama().float()
    for layer in model.model.layers:
        layer.mlp.up_proj = Packed(layer.mlp.up_proj)
    return model


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_weights_that_are_packed_in_buffers_count(name):
    model, other = packed_llama(), packed_llama()
    held = other.model.layers[1].mlp.up_proj
    expected = fingerprint(model)
    assert fingerprint(other) == expected
    held.shifts += 1
    assert fingerprint(other) == expected
    compressor, again = (Select(one, ratio=2, by="key_norm", bos_token=1).eval() for one in (model, other))
    memory = compressor.encode(torch.arange(2, 15)[None])
    again.check_readable(memory)
    # A changed buffer and another in its place are both seen.
    getattr(held, name).mul_(3)
    assert fingerprint(other) != expected
    with pytest.raises(ValueError, match="a model of the same shape with other weights"):
        again.check_readable(memory)
    again.double().float()
    setattr(held, name, getattr(model.model.layers[1].mlp.up_proj, name).clone())
    again.check_readable(memory)


def test_attach_takes_a_model_with_adapters():
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    ids = torch.arange(6)[None]
    with attach(model):
        expected = model(ids).logits
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).double()
    with attach(wrapped):
        torch.testing.assert_close(wrapped(input_ids=ids).logits, expected, rtol=1e-10, atol=1e-10)


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(ValueError, match=r"model: expected weights with values, got .* on device meta"):
        fingerprint(model)


ROPE = [
    ("llama", {}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 32},
    ),
    ("qwen3", {}),
    ("gemma3", {}),
]


@pytest.mark.parametrize(("family", "changes"), ROPE)
def test_rerotated_keys_are_those_of_the_other_positions(family, changes):
    model = tiny(family, **changes)
    ids = torch.randint(0, 50, (2, 4))
    positions = torch.tensor([[9, 2, 3, 17], [30, 11, 8, 7]])
    # One token of each row far away, so that a dynamic RoPE has the same frequencies in both passes.
    far = torch.full((2, 1), 100)

    def keys_at(where):
        keep = KeptKeys(slice(0, 4))
        with attach(model), torch.no_grad():
            model(torch.cat([ids, ids[:, :1]], 1), position_ids=torch.cat([where, far], 1), keep=keep)
        return [key for key, _ in keep.layers]

    keys = keys_at(positions)[0]
    for delta in (37, -3, torch.tensor([[1, 0, -2, 9], [40, 5, 5, -7]])):
        moved = keys_at(positions + delta)
        # Deeper layers see other distances, so only the first layer's keys are comparable between the two passes.
        turned = ops.rerotate(keys, delta, frequencies(model)[0])
        torch.testing.assert_close(turned, moved[0], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(keys, moved[0])


def test_every_layer_has_its_own_frequencies():
    model = tiny("gemma3")
    found = frequencies(model)
    for inv_freq, kind in zip(found, model.config.layer_types, strict=True):
        assert torch.equal(inv_freq, getattr(model.model.rotary_emb, f"{kind}_inv_freq"))
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_a_model_without_a_known_rope_has_no_frequencies(family):
    with pytest.raises(ValueError, match=f"model: expected one with RoPE of a known family.*got {family}"):
        frequencies(tiny(family))
