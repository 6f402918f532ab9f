"""window_pool forward: parity with a loop over windows, memory layouts, ragged windows, rotation, instruction sets."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import gistkit
from gistkit.ops import reference
from tests.helpers.views import VIEWS
from tests.ops.test_rope import DTYPES, error
from tests.ops.test_rope import heads_of as rows_of
from tests.ops.test_rope import oracle as rotated

# B, H, N, D, Dv, windows
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 6, 5, 7),
    (1, 2, 13, 5, 16, 4),
    (3, 1, 17, 17, 3, 1),
    (2, 2, 37, 64, 96, 5),
    (1, 3, 101, 128, 80, 10),
    (1, 1, 211, 23, 256, 211),
]


def frequencies(rotary, base=10000.0):
    return base ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def oracle(x, windows, positions=None, inv_freq=None, scaling=1.0, interleaved=False):
    """A loop over windows, in long double."""
    x = x.detach().double().numpy().astype(np.longdouble)
    batch, heads, tokens, dim = x.shape
    if isinstance(windows, int):
        edges = [min(begin, tokens) for begin in range(0, tokens + windows, windows)]
        windows = torch.tensor(edges)
    windows = windows.expand(batch, -1).tolist()
    out = np.zeros((batch, heads, len(windows[0]) - 1, dim), dtype=np.longdouble)
    for b, offsets in enumerate(windows):
        for w, (begin, end) in enumerate(pairwise(offsets)):
            if end > begin:
                out[b, :, w] = sum(x[b, :, n] for n in range(begin, end)) / (end - begin)
    return out if positions is None else rotated(out, positions, inv_freq, scaling, interleaved)


def assert_as_good_as_torch(key, value=None, **options):
    """Against the exact means, at most twice the error of the torch form; returns what gistkit gives."""
    got, plain = (form(key, value, **options) for form in (gistkit.window_pool, reference.window_pool))
    windows = options["windows"]
    pairs = [(got, plain, key, options)] if value is None else []
    if value is not None:
        pairs = [(got[0], plain[0], key, options), (got[1], plain[1], value, {"windows": windows})]
    for mine, theirs, given, how in pairs:
        exact = oracle(given, **how)
        assert mine.shape == exact.shape and mine.dtype == given.dtype and mine.is_contiguous()
        tiny = torch.finfo(given.dtype).eps * float(np.abs(exact).max(initial=0))
        assert error(theirs, exact) <= max(100 * tiny, 1e-11), "the torch form is not what the loop computes"
        assert error(mine, exact) <= 2 * error(theirs, exact) + tiny
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(isa, shape, dtype):
    batch, heads, tokens, dim, value_dim, windows = shape
    key, value = rows_of(batch, heads, tokens, dim, dtype), rows_of(batch, heads, tokens, value_dim, dtype, 1)
    assert_as_good_as_torch(key, value, windows=windows)
    assert_as_good_as_torch(key, windows=windows)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2, 1, 2), (2, 3, 7, 9, 3, 6), (1, 2, 37, 64, 4, 64), (2, 2, 23, 80, 5, 36)]
)
def test_rotation(isa, shape, dtype, interleaved):
    batch, heads, tokens, dim, ratio, rotary = shape
    key, value = rows_of(batch, heads, tokens, dim, dtype), rows_of(batch, heads, tokens, dim, dtype, 1)
    count = -(-tokens // ratio)
    options = dict(windows=min(ratio, tokens), inv_freq=frequencies(rotary), scaling=1.25, interleaved=interleaved)
    for positions in (torch.arange(count) * ratio, torch.rand(batch, count, dtype=torch.float64) * 5000):
        assert_as_good_as_torch(key, value, positions=positions, **options)


RAGGED = {
    "gaps": torch.tensor([2, 3, 9]),
    "whole": torch.tensor([0, 12]),
    "one token each": torch.arange(13),
    "rows": torch.tensor([[0, 1, 12, 12], [3, 4, 6, 11], [12, 12, 12, 12]]),
    "one row of a wider tensor": torch.tensor([[0, 5], [1, 7], [9, 11]]).T.contiguous().T,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RAGGED)
def test_ragged(isa, name, dtype):
    key, value = rows_of(3, 2, 12, 24, dtype), rows_of(3, 5, 12, 7, dtype, 1)
    windows = RAGGED[name]
    positions = torch.arange(windows.shape[-1] - 1) + 0.5
    assert_as_good_as_torch(key, value, windows=windows)
    out, _ = assert_as_good_as_torch(key, value, windows=windows, positions=positions, inv_freq=frequencies(10))
    missing = windows.expand(3, -1).diff() == 0
    assert not out.transpose(1, 2)[missing].any()


@pytest.mark.parametrize("count", [31, 32, 33, 64, 1000, 20000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_windows(isa, dtype, count):
    """As exact as torch's mean, which adds up in a tree, and not only as its scatter_add."""
    key = (rows_of(1, 1, count + 3, 19) + 10).to(dtype)
    exact = key[:, :, :count].double().mean(2)
    got = gistkit.window_pool(key, windows=torch.tensor([0, count]))[:, :, 0]
    theirs = key[:, :, :count].mean(2)
    tiny = torch.finfo(dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max() + tiny


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 3, 0)], ids=str)
def test_empty(shape):
    for windows in (2, torch.tensor([0, 1, 3])):
        out, value = gistkit.window_pool(torch.zeros(shape), torch.zeros(shape), windows=windows)
        assert out.shape == value.shape == (*shape[:2], 2, shape[3])
    rotation = dict(positions=torch.arange(2), inv_freq=frequencies(shape[3]) if shape[3] else torch.empty(0))
    assert gistkit.window_pool(torch.zeros(shape), windows=2, **rotation).shape == (*shape[:2], 2, shape[3])


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 0), (0, 8), (0, 0)])
def test_rows_without_columns_leave_the_others_as_they_are(dim, value_dim):
    key, value = (rows_of(2, 3, 10, d).requires_grad_() for d in (dim, value_dim))
    pooled = gistkit.ops.window_pool(key, value, windows=4)
    grads = torch.autograd.grad(pooled, (key, value), [torch.ones_like(x) for x in pooled])
    for x, mean, grad in zip((key, value), pooled, grads, strict=True):
        assert mean.shape == (2, 3, 3, x.size(3)) and grad.shape == x.shape
        assert torch.equal(mean, gistkit.ops.window_pool(x, windows=4))
        assert torch.equal(grad, torch.tensor([0.25] * 8 + [0.5] * 2)[:, None].expand_as(grad))


def test_a_text_shorter_than_a_window_is_one():
    key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    for found, tokens in zip(gistkit.window_pool(key, value, windows=9), (key, value), strict=True):
        torch.testing.assert_close(found, tokens.mean(2, keepdim=True))


def test_hidden_states():
    hidden, other = rows_of(2, 1, 13, 40)[:, 0], rows_of(2, 1, 13, 9, seed=1)[:, 0]
    windows = torch.tensor([[0, 4, 13], [1, 2, 2]])
    heads = gistkit.window_pool(hidden[:, None], other[:, None], windows=windows)
    for form in (gistkit.window_pool, reference.window_pool):
        both = form(hidden, other, windows=windows)
        assert [x.shape for x in both] == [(2, 2, 40), (2, 2, 9)]
        torch.testing.assert_close(both[0], heads[0][:, 0])
        torch.testing.assert_close(both[1], heads[1][:, 0])
        torch.testing.assert_close(form(hidden, windows=windows), both[0])


@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_views(isa, layout, dtype):
    key, value = rows_of(2, 3, 35, 24, dtype), rows_of(2, 3, 35, 40, dtype, 1)
    options = dict(windows=4, positions=torch.arange(9), inv_freq=frequencies(20))
    expected = gistkit.window_pool(key, value, **options)
    got = gistkit.window_pool(layout(key), layout(value), **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_expanded_heads():
    key = rows_of(2, 1, 9, 8).expand(2, 4, 9, 8)
    assert torch.equal(gistkit.window_pool(key, windows=2), gistkit.window_pool(key.contiguous(), windows=2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64], ids=str)
def test_position_dtypes_and_forms(dtype):
    key = rows_of(2, 2, 6, 8)
    row = torch.tensor([3, 0, 100]).to(dtype)
    expected = gistkit.window_pool(key, windows=2, positions=row.double(), inv_freq=frequencies(8))
    for positions in (row, row[None], row.expand(2, 3)):
        got = gistkit.window_pool(key, windows=2, positions=positions, inv_freq=frequencies(8))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_rope(isa, interleaved):
    """At large and fractional positions too, but for the rounding of a fused product."""
    key = rows_of(2, 3, 40, 72)
    positions = torch.tensor([0, 2.5, 1e9 + 7, 2**40 + 0.5])
    options = dict(scaling=0.7, interleaved=interleaved)
    got = gistkit.window_pool(key, windows=10, positions=positions, inv_freq=frequencies(64), **options)
    pooled = gistkit.window_pool(key, windows=10)
    expected, _ = gistkit.rope(pooled, pooled, positions, frequencies(64), **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-7)


def test_a_window_of_one_token_is_a_copy(isa):
    key = rows_of(1, 2, 9, 20, torch.bfloat16)
    key[0, 0, 3, 5], key[0, 1, 4, 0] = float("inf"), -0.0
    out = gistkit.window_pool(key, windows=1)
    assert torch.equal(out.view(torch.int16), key.view(torch.int16)) and out.data_ptr() != key.data_ptr()


def test_sums_of_halves_do_not_overflow(isa):
    key = torch.full((1, 1, 100, 8), 60000.0, dtype=torch.float16)
    assert torch.equal(gistkit.window_pool(key, windows=50), key[:, :, :2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_isas_agree(isa, dtype):
    key, value = rows_of(2, 3, 333, 80, dtype), rows_of(2, 3, 333, 45, dtype, 1)
    windows = torch.tensor([0, 3, 120, 121, 300])
    rotation = dict(positions=torch.arange(4) * 1000, inv_freq=frequencies(72))
    plain, turned = (gistkit.window_pool(key, value, windows=windows, **how) for how in ({}, rotation))
    gistkit.ops.cpu_isa("generic")
    assert all(torch.equal(a, b) for a, b in zip(plain, gistkit.window_pool(key, value, windows=windows), strict=True))
    eps = torch.finfo(dtype).eps
    expected, _ = gistkit.window_pool(key, value, windows=windows, **rotation)
    torch.testing.assert_close(turned[0], expected, rtol=2 * eps, atol=2 * eps)
