"""rope: what rotations are for, as properties. `tests/hf` compares it with transformers' own, type by type."""

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
