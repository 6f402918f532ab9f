"""rope forward: parity with an extended-precision oracle, memory layouts, positions, instruction sets, threads."""

import numpy as np
import pytest
import torch

import gistkit
from gistkit.ops import reference
from tests.helpers.views import VIEWS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# B, Hq, Hk, N, D, R
SHAPES = [
    (1, 1, 1, 1, 2, 2),
    (2, 3, 1, 7, 6, 4),
    (1, 2, 1, 3, 5, 4),
    (3, 2, 2, 5, 17, 10),
    (1, 4, 2, 37, 32, 32),
    (2, 8, 2, 33, 128, 128),
    (1, 2, 1, 67, 256, 64),
]


def oracle(heads, positions, inv_freq, scaling=1.0, interleaved=False):
    """Complex multiplication in long double, of a tensor or an array [B, H, N, D]."""
    x = heads.detach().double().numpy().astype(np.longdouble) if isinstance(heads, torch.Tensor) else heads
    p = positions.detach().numpy().astype(np.longdouble)
    f = inv_freq.detach().double().numpy().astype(np.longdouble)
    p = p.reshape((1,) * (3 - p.ndim) + p.shape)
    f = f.reshape((1,) * (3 - f.ndim) + f.shape)
    angle = sum(p[a][:, None, :, None] * f[:, a][None, :, None, :] for a in range(len(p)))
    half = f.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle) * np.longdouble(scaling)
    out = x.copy()
    out[..., first], out[..., second] = z.real, z.imag
    return out


def error(out, exact):
    return float(np.abs(out.detach().double().numpy() - exact).max(initial=0))


def assert_as_good_as_torch(query, key, positions, inv_freq, **options):
    out = gistkit.rope(query, key, positions, inv_freq, **options)
    plain = reference.rope(query, key, positions, inv_freq, **options)
    for got, torch_form, given in zip(out, plain, (query, key), strict=True):
        exact = oracle(given, positions, inv_freq, **options)
        assert got.shape == given.shape and got.dtype == given.dtype
        tiny = torch.finfo(given.dtype).eps * float(np.abs(exact).max(initial=0))
        assert error(got, exact) <= 2 * error(torch_form, exact) + tiny
    return out


def heads_of(batch, count, tokens, dim, dtype=torch.float32, seed=0):
    return torch.randn(batch, count, tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def frequencies(rotary, base=10000.0):
    return base ** -(torch.arange(0, rotary, 2) / rotary)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(isa, shape, dtype, interleaved):
    batch, queries, keys, tokens, dim, rotary = shape
    query, key = heads_of(batch, queries, tokens, dim, dtype), heads_of(batch, keys, tokens, dim, dtype, 1)
    positions = torch.randint(0, 5000, (batch, tokens), generator=torch.Generator().manual_seed(2))
    assert_as_good_as_torch(query, key, positions, frequencies(rotary), scaling=1.25, interleaved=interleaved)


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 4), (2, 0, 0, 3, 4), (2, 3, 0, 5, 4), (2, 2, 1, 0, 4)], ids=str)
def test_empty(shape):
    batch, queries, keys, tokens, dim = shape
    query, key = heads_of(batch, queries, tokens, dim), heads_of(batch, keys, tokens, dim)
    out = assert_as_good_as_torch(query, key, torch.arange(tokens), frequencies(dim))
    assert [x.shape for x in out] == [query.shape, key.shape]


def test_no_rotary_dims_is_a_copy():
    query = heads_of(1, 2, 3, 4)
    out, _ = gistkit.rope(query, query, torch.arange(3), torch.empty(0))
    assert torch.equal(out, query) and out.data_ptr() != query.data_ptr()


@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_views(isa, layout, dtype):
    query, key = heads_of(2, 3, 35, 24, dtype), heads_of(2, 1, 35, 24, dtype, 1)
    positions = torch.arange(35)
    expected = gistkit.rope(query, key, positions, frequencies(24))
    got = gistkit.rope(layout(query), layout(key), positions, frequencies(24))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_expanded_heads_and_positions():
    query = heads_of(2, 1, 9, 8).expand(2, 4, 9, 8)
    positions = torch.arange(9)[None].expand(2, 9)
    got, _ = gistkit.rope(query, query, positions, frequencies(8))
    expected, _ = gistkit.rope(query.contiguous(), query.contiguous(), positions.contiguous(), frequencies(8))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
def test_position_dtypes_and_forms(dtype):
    query, key = heads_of(2, 2, 6, 8), heads_of(2, 1, 6, 8, seed=1)
    row = torch.tensor([3, 0, 0, 100, 7, 2]).to(dtype)
    expected = gistkit.rope(query, key, row.double(), frequencies(8))
    for positions in (row, row[None], row.expand(2, 6), row.expand(1, 1, 6), row.expand(1, 2, 6)):
        got = gistkit.rope(query, key, positions, frequencies(8))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fractional_positions_on_several_axes(isa, dtype):
    generator = torch.Generator().manual_seed(3)
    query, key = heads_of(2, 3, 21, 40, dtype), heads_of(2, 3, 21, 40, dtype, 1)
    positions = torch.randn(3, 2, 21, generator=generator, dtype=torch.float64) * 50
    shared = torch.rand(3, 15, generator=generator)
    per_head = torch.randn(3, 3, 15, generator=generator)
    for inv_freq in (shared, per_head, per_head.double()):
        assert_as_good_as_torch(query, key, positions, inv_freq)


def test_axes_are_not_merged():
    query = heads_of(1, 1, 4, 8)
    rows, columns = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    inv_freq = torch.tensor([[1.0, 0.1, 0, 0], [0, 0, 1.0, 0.1]])
    out, _ = gistkit.rope(query, query, torch.stack([rows, columns])[:, None], inv_freq)
    x, y = query[..., [0, 1, 4, 5]], query[..., [2, 3, 6, 7]]
    by_row, _ = gistkit.rope(x, x, rows, inv_freq[0, :2])
    by_column, _ = gistkit.rope(y, y, columns, inv_freq[1, 2:])
    assert torch.equal(out[..., [0, 1, 4, 5]], by_row) and torch.equal(out[..., [2, 3, 6, 7]], by_column)


LARGE = [2**24 + 1, 10**9 + 7, 2**31 + 11, 2**33 + 1, -(2**40) - 3, 2**53 - 1]


@pytest.mark.parametrize("position", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_positions(isa, position, dtype):
    inv_freq = frequencies(128).double()
    unit = torch.cat([torch.ones(64), torch.zeros(64)]).to(dtype).expand(1, 1, 2, 128)
    positions = torch.tensor([position, position - 1])
    out, _ = gistkit.rope(unit, unit, positions, inv_freq)
    # The angle modulo a turn in integers scaled by 2^140: exact where even long double is not.
    turns = 2**140 * 10**60 // 6283185307179586476925286766559005768394338798750211641949889
    exact = np.empty((2, 128))
    for row, p in enumerate(positions.tolist()):
        for f, (numerator, denominator) in enumerate(map(float.as_integer_ratio, inv_freq.tolist())):
            fraction = (p * numerator * turns // denominator) % 2**140
            angle = np.longdouble(fraction >> 76) / np.longdouble(2**64) * (2 * np.longdouble(np.pi) + PI_REST)
            exact[row, f], exact[row, 64 + f] = np.cos(angle), np.sin(angle)
    assert error(out[0, 0], exact) <= {torch.float32: 3.0e-8, torch.float64: 4e-16}[dtype]


# 2 pi minus the double nearest to it.
PI_REST = np.longdouble(2.4492935982947064e-16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
def test_no_position_is_rounded(dtype):
    """Neighbouring positions, large for their dtype, differ by exactly one step."""
    top = {torch.int32: 2**31 - 1, torch.int64: 2**52, torch.float32: 2**24, torch.float64: 2**52}[dtype]
    query = heads_of(1, 1, 2, 4, torch.float64)[:, :, :1].expand(1, 1, 2, 4)
    inv_freq = torch.tensor([1.0, 0.25])
    out, _ = gistkit.rope(query, query, torch.tensor([top - 1, top], dtype=dtype), inv_freq)
    stepped, _ = gistkit.rope(out[:, :, :1], out[:, :, :1], torch.tensor([1]), inv_freq)
    torch.testing.assert_close(stepped, out[:, :, 1:], rtol=0, atol=1e-15)


def test_nan_stays_in_its_pair():
    query = heads_of(1, 2, 40, 32)
    expected, _ = gistkit.rope(query, query, torch.arange(40), frequencies(32))
    query[0, 1, 7, 3] = float("nan")
    out, _ = gistkit.rope(query, query, torch.arange(40), frequencies(32))
    touched = torch.zeros_like(query, dtype=torch.bool)
    touched[0, 1, 7, [3, 19]] = True
    assert out[touched].isnan().all() and torch.equal(out[~touched], expected[~touched])


@pytest.mark.parametrize("delta", [-3, 2.5, torch.tensor([5, -1, 0, 2**40])])
def test_rerotate(delta):
    key, positions = heads_of(2, 2, 4, 16, torch.float64), torch.tensor([0, 9, 4, 1])
    for interleaved in (False, True):
        how = {"interleaved": interleaved}
        rotated, _ = gistkit.rope(key, key, positions, frequencies(16), scaling=1.5, **how)
        moved = gistkit.rerotate(rotated, delta, frequencies(16), **how)
        expected, _ = gistkit.rope(key, key, positions + delta, frequencies(16), scaling=1.5, **how)
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-14)
