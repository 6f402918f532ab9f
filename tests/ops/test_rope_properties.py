"""rope: what rotations are for, as properties, and parity with transformers for its rope types."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gistkit

POSITIONS = st.one_of(
    st.integers(-(2**40), 2**40), st.floats(-1e9, 1e9, allow_nan=False), st.sampled_from([0, 1, 2**24 + 1, 2**31])
)


@st.composite
def heads_and_positions(draw):
    tokens, rotary = draw(st.integers(1, 9)), 2 * draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query = torch.randn(1, 2, tokens, rotary + draw(st.integers(0, 3)), generator=generator, dtype=torch.float64)
    positions = torch.tensor([draw(POSITIONS) for _ in range(tokens)], dtype=torch.float64)
    return query, positions, torch.rand(rotary // 2, generator=generator), draw(st.booleans())


@given(heads_and_positions())
@settings(max_examples=60, deadline=None)
def test_rotating_back(case):
    query, positions, inv_freq, interleaved = case
    there, _ = gistkit.rope(query, query, positions, inv_freq, interleaved=interleaved)
    back, _ = gistkit.rope(there, there, -positions, inv_freq, interleaved=interleaved)
    torch.testing.assert_close(back, query, rtol=0, atol=4e-15)
    torch.testing.assert_close(there.norm(dim=-1), query.norm(dim=-1), rtol=1e-14, atol=0)


ROPE_TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.3 * i for i in range(16)],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def assert_like_transformers(apply, theirs, query, key, positions, inv_freq, scaling):
    """Error against float64 at most twice transformers' own."""
    rotary = 2 * inv_freq.shape[-1]
    angle = (positions[..., None].double() * inv_freq.double()).repeat(1, 1, 2)
    x, y = query[..., :rotary].double(), key[..., :rotary].double()
    truth = apply(x, y, angle.cos() * scaling, angle.sin() * scaling)
    mine = gistkit.rope(query, key, positions, inv_freq, scaling=scaling)
    for got, hf, exact in zip(mine, theirs, truth, strict=True):
        hf_error = (hf[..., :rotary].double() - exact).abs().max()
        assert hf_error < 1e-3, "the float64 form is not what transformers computes"
        assert (got[..., :rotary].double() - exact).abs().max() <= 2 * hf_error
        assert torch.equal(got[..., rotary:], hf[..., rotary:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length"),
    # Beyond the original length; these choose their frequencies by the length.
    [*((kind, 200) for kind in ROPE_TYPES), ("dynamic", 50), ("longrope", 50)],
)
def test_rope_types_of_transformers(kind, length):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64 if kind == "dynamic" else 512,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPE_TYPES[kind]},
    )
    rotary = llama.LlamaRotaryEmbedding(config)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, h, length, 32, generator=generator) for h in (4, 2))
    positions = torch.stack([torch.arange(length), torch.randint(0, length, (length,), generator=generator)])
    cos, sin = rotary(query, positions)
    theirs = llama.apply_rotary_pos_emb(query, key, cos, sin)
    # Dynamic and longrope types choose inv_freq in the call: the module holds what it used.
    assert_like_transformers(
        llama.apply_rotary_pos_emb, theirs, query, key, positions, rotary.inv_freq, rotary.attention_scaling
    )


@pytest.mark.slow
def test_partial_rotary_of_transformers():
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox", reason="needs transformers")
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(hidden_size=128, num_attention_heads=4)
    rotary = neox.GPTNeoXRotaryEmbedding(config)
    assert 2 * len(rotary.inv_freq) < 32
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 4, 40, 32, generator=generator) for _ in range(2))
    positions = torch.arange(40)[None] * 7
    theirs = neox.apply_rotary_pos_emb(query, key, *rotary(query, positions))
    assert_like_transformers(
        neox.apply_rotary_pos_emb, theirs, query, key, positions, rotary.inv_freq, rotary.attention_scaling
    )


@pytest.mark.slow
def test_interleaved_pairs_of_transformers():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj", reason="needs transformers")
    query = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(30)
    sin, cos = gptj.create_sinusoidal_positions(30, 16)[None].chunk(2, dim=-1)
    theirs = gptj.apply_rotary_pos_emb(query.transpose(1, 2), sin, cos).transpose(1, 2)
    inv_freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    mine, _ = gistkit.rope(query, query, positions, inv_freq, interleaved=True)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
