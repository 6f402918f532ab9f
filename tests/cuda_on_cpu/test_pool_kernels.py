"""window_pool's CUDA kernel against float64, with the plain torch form of the same precision as the measure."""

from __future__ import annotations

from functools import partial

import emulation
import pytest
import torch
from pool_params import pool
from test_rope_kernels import FLOATS
from test_rope_kernels import heads_of as rows_of
from torch import Tensor
from trie_cases import assert_close

from gistkit.ops import reference
from tests.ops.test_rope import frequencies

pytestmark = pytest.mark.usefixtures("build")


def equal_windows(tokens: int, ratio: int) -> Tensor:
    return torch.arange(0, tokens + ratio, ratio).clamp(max=tokens)[None]


assert_as_close = partial(assert_close, double=1e-11, least=0)


def check(key: Tensor, value: Tensor, offsets: Tensor, **rotation: object) -> None:
    """Both directions: the means, and the gradient of the plain form."""

    def both(dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs = [x.to(dtype).requires_grad_() for x in (key, value)]
        out = reference.window_pool(*inputs, windows=offsets.expand(len(key), -1), **rotation)
        found = torch.autograd.grad(out, inputs, [g.to(dtype) for g in grads])
        return tuple(x.detach() for x in out), found

    grads = [rows_of(*x.shape[:2], offsets.size(1) - 1, x.size(3), x.dtype) for x in (key, value)]
    right, plain = both(torch.float64), both(key.dtype)
    how = {"seed": key.size(2)}
    if "positions" in rotation:
        rotation["positions"] = rotation["positions"].view(-1, offsets.size(1) - 1)
    assert_as_close(pool(key, value, offsets, **rotation, **how), plain[0], right[0])
    assert_as_close(pool(*grads, offsets, tokens=key.size(2), **rotation, **how), plain[1], right[1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dim", "value_dim", "ratio"),
    [(1, 1, 1, 1, 1, 1), (2, 3, 37, 64, 80, 5), (1, 2, 203, 16, 8, 10), (1, 1, 65, 9, 24, 65), (2, 2, 63, 32, 32, 1)],
)
def test_parity(batch: int, heads: int, tokens: int, dim: int, value_dim: int, ratio: int, dtype: torch.dtype) -> None:
    key, value = rows_of(batch, heads, tokens, dim, dtype), rows_of(batch, heads + 1, tokens, value_dim, dtype)
    check(key, value, equal_windows(tokens, ratio))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 64, 64), (1, 80, 32), (2, 21, 14)])
def test_rotation(heads: int, dim: int, rotary: int, dtype: torch.dtype, interleaved: bool) -> None:
    key, value = rows_of(2, heads, 83, dim, dtype), rows_of(2, heads, 83, dim, dtype)
    options = {"inv_freq": frequencies(rotary), "scaling": 1.25, "interleaved": interleaved}
    offsets = equal_windows(83, 4)
    check(key, value, offsets, positions=torch.rand(2, 21, dtype=torch.float64) * 900, **options)
    check(key, value[:, :0], offsets, positions=torch.arange(21), **options)


def test_ragged_rows_and_tokens_outside() -> None:
    key, value = rows_of(3, 2, 70, 24), rows_of(3, 2, 70, 12)
    offsets = torch.tensor([[0, 1, 69, 69, 69], [5, 40, 41, 42, 60], [70, 70, 70, 70, 70]])
    check(key, value, offsets)
    check(key, value, offsets, positions=torch.arange(4), inv_freq=frequencies(24))
    check(key, value, torch.tensor([[3, 60]]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tokens_are_added_one_after_the_other(dtype: torch.dtype) -> None:
    """How many are read at once changes no bit: up to 32 in a row, longer windows by such sums in float64."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    lengths = [*range(1, 14), 31, 32, 33, 40, 63, 64, 65, 97]
    offsets = torch.tensor([[0, *lengths]]).cumsum(1)
    for dim in (40, 37, 16, 2):
        key = rows_of(1, 2, int(offsets[0, -1]), dim, dtype)
        out, _ = pool(key, key[:, :0], offsets)
        for w, length in enumerate(lengths):
            rows = key[:, :, offsets[0, w] : offsets[0, w + 1]].to(compute)
            sums = []
            for first in range(0, length, 32):
                sums.append(rows[:, :, first])
                for row in rows[:, :, first + 1 : first + 32].unbind(2):
                    sums[-1] = sums[-1] + row
            total = sums[0] if length <= 32 else sum(x.double() for x in sums)
            assert torch.equal(out[:, :, w], (total / length).to(compute).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_windows_gradient_is_divided_once(dtype: torch.dtype) -> None:
    lengths = [*range(1, 18), 64, 97]
    offsets = torch.tensor([[0, *lengths]]).cumsum(1)
    grad = rows_of(1, 3, len(lengths), 24, dtype)
    out, _ = pool(grad, grad[:, :0], offsets, tokens=int(offsets[0, -1]))
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    counts = torch.tensor(lengths)
    right = (grad.to(compute) / counts[:, None]).to(dtype)
    assert torch.equal(out, right.repeat_interleave(counts, 2))


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 0), (0, 8), (0, 0)])
def test_rows_without_columns(dim: int, value_dim: int) -> None:
    key, value = rows_of(2, 3, 12, dim), rows_of(2, 2, 12, value_dim)
    offsets = torch.tensor([[2, 5, 9]])
    check(key, value, offsets)
    if dim:
        check(key, value, offsets, positions=torch.arange(2), inv_freq=frequencies(dim))


@pytest.mark.parametrize("build", emulation.ORDERS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [None, 64])
def test_cosines_and_sines_without_bank_conflicts(tokens: int | None, dtype: torch.dtype) -> None:
    rows, offsets = rows_of(1, 8, tokens or 64, 128, dtype), equal_windows(64, 4)
    given = rows[:, :, :16].contiguous() if tokens else rows
    rotation = {"positions": torch.arange(16).view(1, 16), "inv_freq": frequencies(128)}
    emulation.statistics()
    pool(given, given[:, :0], offsets, tokens=tokens, **rotation)
    counts = emulation.statistics()
    warps = 8 * 16 * 64 * dtype.itemsize // 16 // 32
    # And one for the window's tokens: 16 bytes that lanes share.
    assert counts.shared_loads == warps * (1 + 32 // dtype.itemsize // 4)
    assert counts.load_wavefronts == 4 * counts.shared_loads


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_long_windows() -> None:
    key = rows_of(1, 1, 3000, 8) + 10
    got, _ = pool(key, key[:, :0], torch.tensor([[0, 3000]]))
    torch.testing.assert_close(got[0, 0, 0].double(), key.double().mean((0, 1, 2)), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_views(dtype: torch.dtype) -> None:
    key, offsets = rows_of(2, 3, 18, 32, dtype), equal_windows(18, 4)
    rotation = {"positions": torch.arange(5).view(1, 5), "inv_freq": frequencies(16)}
    expected = pool(key, key, offsets, **rotation)
    flat = torch.zeros(key.numel() + 1, dtype=dtype)
    flat[1:] = key.flatten()
    wide = torch.randn(2, 3, 18, 40).to(dtype)
    wide[..., 8:] = key
    for view in (key.transpose(1, 2).contiguous().transpose(1, 2), flat[1:].view(key.shape), wide[..., 8:]):
        assert all(torch.equal(a, b) for a, b in zip(pool(view, view, offsets, **rotation), expected, strict=True))


def test_a_window_of_one_token_is_a_copy() -> None:
    key = rows_of(1, 2, 9, 20, torch.bfloat16)
    key[0, 0, 3, 5], key[0, 1, 4, 0] = float("inf"), -0.0
    out, _ = pool(key, key, equal_windows(9, 1))
    assert torch.equal(out.view(torch.int16), key.view(torch.int16))


def test_offsets_that_leave_the_tokens_are_cut_off() -> None:
    key = rows_of(1, 1, 9, 8)
    offsets = torch.tensor([[-5, 3, 2, 2000]])
    out, _ = pool(key, key, offsets)
    torch.testing.assert_close(out[:, :, 0], key[:, :, :3].mean(2))
    torch.testing.assert_close(out[:, :, 2], key[:, :, 2:].mean(2))
    assert not out[:, :, 1].any()
    pool(out, out, offsets, tokens=9, checked=False)


def test_heads_are_shared_out_when_windows_are_few() -> None:
    key, value, offsets = rows_of(2, 13, 20, 16), rows_of(2, 5, 20, 16), equal_windows(20, 20)
    emulation.statistics()
    check(key, value, offsets)
    assert emulation.statistics().blocks == 2 * (2 * 13 * 2)
