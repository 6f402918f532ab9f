"""RoPE's CUDA kernels against float64, with the plain torch form of the same precision as the measure."""

from __future__ import annotations

import emulation
import pytest
import torch
from rope_params import rope, rope_angle_grad
from torch import Tensor

from gistkit.ops import reference
from tests.helpers.views import as_slice_of_wider, as_token_major, as_unaligned

pytestmark = pytest.mark.usefixtures("build")

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def heads_of(batch: int, count: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, count, tokens, dim).to(dtype)


def frequencies(rotary: int, *, heads: int = 1, axes: int = 1) -> Tensor:
    inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / max(rotary, 1))
    return (inv_freq * (1 + torch.rand(heads, axes, 1))).contiguous()


def exact(heads: Tensor, positions: Tensor, inv_freq: Tensor, **options: object) -> Tensor:
    return reference.rope(heads.double(), heads.double(), positions, inv_freq.double(), **options)[0]


def assert_as_good_as_torch(query: Tensor, key: Tensor, positions: Tensor, inv_freq: Tensor, **options: object) -> None:
    how = {name: options.pop(name) for name in ("order", "seed", "checked") if name in options}
    rotated = rope(query, key, positions, inv_freq, **options, **how)
    tiny = torch.finfo(query.dtype).tiny
    for got, given in zip(rotated, (query, key), strict=True):
        if given.numel() == 0:
            continue
        plain = reference.rope(given, given, positions, inv_freq, **options)[0]
        right = exact(given, positions, inv_freq, **options)
        # In float64 both are exact but for the angle, which the plain form rounds.
        rounding = (
            1e-15 * (1 + positions.abs().max().double()) * given.abs().max() if given.dtype == torch.float64 else 0
        )
        # Of a few elements the plain form may have rounded all to the right side.
        rounding += torch.finfo(given.dtype).eps / 2 * right.abs().max()
        allowed = 2 * (plain.double() - right).abs().max() + rounding + tiny
        assert (got.double() - right).abs().max() <= allowed


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("batch", "query_heads", "key_heads", "tokens", "dim", "rotary"),
    [(1, 1, 1, 1, 2, 2), (2, 3, 1, 17, 64, 64), (1, 2, 2, 33, 80, 32), (1, 1, 2, 5, 20, 14), (2, 2, 0, 16, 32, 16)],
)
def test_parity(
    batch: int,
    query_heads: int,
    key_heads: int,
    tokens: int,
    dim: int,
    rotary: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    query, key = heads_of(batch, query_heads, tokens, dim, dtype), heads_of(batch, key_heads, tokens, dim, dtype)
    positions = torch.randint(0, 100_000, (1, batch, tokens))
    options = {"scaling": 1.25, "interleaved": interleaved, "seed": tokens}
    assert_as_good_as_torch(query, key, positions, frequencies(rotary), **options)


def test_frequencies_of_each_head_on_several_axes() -> None:
    query, key = heads_of(2, 3, 19, 32), heads_of(2, 3, 19, 32)
    positions = torch.rand(2, 1, 19, dtype=torch.float64) * 50
    assert_as_good_as_torch(query, key, positions, frequencies(32, heads=3, axes=2))
    without_keys = key[:, :0]
    assert_as_good_as_torch(query, without_keys, positions, frequencies(32, heads=3, axes=2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_position_types(dtype: torch.dtype) -> None:
    query, key = heads_of(2, 1, 9, 16), heads_of(2, 1, 9, 16)
    positions, inv_freq = torch.randint(0, 1000, (1, 2, 9)).to(dtype), frequencies(16)
    assert_as_good_as_torch(query, key, positions, inv_freq)
    strided = positions.transpose(1, 2).contiguous().transpose(1, 2)
    expected = rope(query, key, positions, inv_freq)
    assert torch.equal(rope(query, key, strided, inv_freq)[0], expected[0])


def test_positions_beyond_what_float32_holds() -> None:
    positions = torch.tensor([[[2**24 + 1, 2**31 + 3, 2**40 + 5, 2**52 + 1]]])
    query = heads_of(1, 2, 4, 64)
    inv_freq = frequencies(64).double()
    turns = [[int(p) for p in positions[0, 0]], inv_freq[0, 0].tolist()]
    angle = torch.tensor([[exact_angle(p, f) for f in turns[1]] for p in turns[0]], dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    x, y = query.double().chunk(2, -1)
    right = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    assert (rope(query, query, positions, inv_freq)[0].double() - right).abs().max() < 1e-6


def exact_angle(position: int, frequency: float) -> float:
    """position x frequency modulo 2 pi, in integers: pi to 60 digits."""
    pi, scale = 3141592653589793238462643383279502884197169399375105820974945, 10**60
    numerator, denominator = frequency.as_integer_ratio()
    return position * numerator * scale // denominator % (2 * pi) / scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [as_token_major, as_slice_of_wider, as_unaligned])
def test_strided_views(layout, dtype: torch.dtype) -> None:
    query, key = heads_of(2, 3, 18, 32, dtype), heads_of(2, 1, 18, 32, dtype)
    positions, inv_freq = torch.arange(18).view(1, 1, 18), frequencies(24)
    expected = rope(query, key, positions, inv_freq)
    outputs = layout(torch.full_like(query, float("nan"))), layout(torch.full_like(key, float("nan")))
    for got, right in zip(rope(layout(query), layout(key), positions, inv_freq), expected, strict=True):
        assert torch.equal(got, right)
    rotated = rope(layout(query), layout(key), positions, inv_freq, checked=False, outputs=outputs)
    for got, right in zip(rotated, expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_positions_that_are_not_finite(bad: float, dtype: torch.dtype) -> None:
    """Nothing asks for their values on a GPU: what they turn is NaN, and no access is out of bounds."""
    query, key = heads_of(1, 2, 9, 8, dtype), heads_of(1, 1, 9, 8, dtype)
    positions, inv_freq = torch.arange(9, dtype=torch.float64)[None, None], frequencies(6)
    expected = rope(query, key, positions, inv_freq)
    positions[..., 4] = bad
    for got, wanted in zip(rope(query, key, positions, inv_freq), expected, strict=True):
        assert bad == 1e300 or got[:, :, 4, :6].isnan().all()
        assert torch.equal(got[:, :, 4, 6:], wanted[:, :, 4, 6:])
        assert torch.equal(got[:, :, :4], wanted[:, :, :4]) and torch.equal(got[:, :, 5:], wanted[:, :, 5:])


def test_inverse_undoes_it() -> None:
    query, key = heads_of(2, 2, 17, 32, torch.float64), heads_of(2, 1, 17, 32, torch.float64)
    positions, inv_freq = torch.randint(0, 9999, (1, 2, 17)), frequencies(32)
    rotated = rope(query, key, positions, inv_freq)
    for got, given in zip(rope(*rotated, positions, inv_freq, inverse=True), (query, key), strict=True):
        torch.testing.assert_close(got, given, rtol=0, atol=1e-14)


def test_no_rotary_dims_is_a_copy() -> None:
    query = heads_of(1, 2, 5, 8)
    assert torch.equal(rope(query, query, torch.arange(5).view(1, 1, 5), torch.empty(1, 1, 0))[0], query)


def test_heads_are_shared_out_when_tokens_are_few() -> None:
    """Decoding: one token, many heads, several blocks."""
    emulation.statistics()
    assert_as_good_as_torch(heads_of(2, 13, 1, 64), heads_of(2, 5, 1, 64), torch.tensor([[[7], [9]]]), frequencies(64))
    assert emulation.statistics().blocks == 2 * 13


@pytest.mark.parametrize("build", emulation.ORDERS, indirect=True)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "dim", "rotary"), [(16, 128, 128), (16, 64, 64), (32, 96, 96), (16, 80, 48)])
def test_cosines_and_sines_without_bank_conflicts(
    tokens: int, dim: int, rotary: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """16 bytes a lane: in half precision 4 loads and 16 wavefronts for a warp's items of 8 frequencies."""
    query, key = heads_of(1, 4, tokens, dim, dtype), heads_of(1, 2, tokens, dim, dtype)
    emulation.statistics()
    rope(query, key, torch.arange(tokens).view(1, 1, -1), frequencies(rotary), interleaved=interleaved)
    counts = emulation.statistics()
    size = 8 if dtype == torch.float64 else 4
    if rotary == dim:  # else there are lanes that only copy
        assert counts.shared_loads == 6 * tokens * rotary * size / 16 / 32
        assert counts.load_wavefronts == 4 * counts.shared_loads
    # A quarter of the warp is served at a time.
    assert 0 < counts.load_wavefronts <= 4 * counts.shared_loads
    # Every block fills a table of its own.
    assert counts.store_wavefronts == counts.blocks * min(tokens, 16) * rotary * size / 128


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "batch", "heads", "tokens", "rotary", "freq_heads", "axes", "shared"),
    [
        (torch.float64, 2, (3, 1), 5, 12, 1, 1, False),
        (torch.float32, 2, (2, 2), 21, 140, 1, 2, True),
        (torch.bfloat16, 1, (3, 3), 17, 16, 3, 2, False),
        (torch.float16, 3, (2, 0), 7, 8, 2, 1, True),
    ],
)
def test_angle_gradients(
    dtype: torch.dtype,
    batch: int,
    heads: tuple[int, int],
    tokens: int,
    rotary: int,
    freq_heads: int,
    axes: int,
    shared: bool,
    interleaved: bool,
) -> None:
    query, key, grad_query, grad_key = (heads_of(batch, count, tokens, rotary + 4, dtype) for count in heads * 2)
    positions = torch.rand(axes, 1 if shared else batch, tokens, dtype=torch.float64) * 20
    inv_freq = frequencies(rotary, heads=freq_heads, axes=axes).double()
    options = {"scaling": 0.75, "interleaved": interleaved}
    got = rope_angle_grad((grad_query, grad_key), (query, key), positions, inv_freq, **options)

    leaves = positions.clone().requires_grad_(), inv_freq.clone().requires_grad_()
    loss = positions.new_zeros(())
    for x, grad in ((query, grad_query), (key, grad_key)):
        if x.size(1):
            loss = loss + (exact(x, *leaves, **options) * grad.double()).sum()
    for mine, right in zip(got, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)
    opposite = rope_angle_grad((grad_query, grad_key), (query, key), positions, -inv_freq, inverse=True, **options)
    torch.testing.assert_close(opposite[1], -got[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch", [0, 2])
def test_angle_gradients_of_no_tokens(batch: int) -> None:
    heads = heads_of(batch, 2, 0, 8), heads_of(batch, 2, 0, 8)
    by_positions, by_inv_freq = rope_angle_grad(heads, heads, torch.zeros(1, 1, 0), frequencies(8))
    assert by_positions.shape == (1, 1, 0) and not by_inv_freq.any()


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_bits_do_not_depend_on_the_order_of_threads() -> None:
    heads = heads_of(3, 4, 40, 24), heads_of(3, 2, 40, 24)
    grads = heads_of(3, 4, 40, 24), heads_of(3, 2, 40, 24)
    positions, inv_freq = torch.arange(40.0).view(1, 1, 40), frequencies(24)
    results = [rope_angle_grad(grads, heads, positions, inv_freq, order=o) for o in emulation.ORDERS]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
