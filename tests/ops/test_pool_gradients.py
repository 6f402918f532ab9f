"""window_pool backward: gradcheck, parity with autograd of the plain form, opcheck, compile, determinism."""

import pytest
import torch
import torch._dynamo.testing

import gistkit
from gistkit.ops import reference
from tests.helpers.devices import assert_as_good
from tests.helpers.threads import assert_same_for_any_number_of_threads

OPS = torch.ops.gistkit
GAPS = torch.tensor([1, 2, 5])
ROWS = torch.tensor([[0, 2, 2], [1, 4, 6]])


def rows_of(shape, dtype=torch.float64, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def frequencies(rotary):
    return 100.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def rotation(windows, rotary, interleaved=False):
    """A fractional position of each window."""
    count = windows.shape[-1] - 1 if isinstance(windows, torch.Tensor) else windows
    return dict(positions=torch.arange(count) * 3.7, inv_freq=frequencies(rotary), scaling=1.3, interleaved=interleaved)


@pytest.mark.parametrize(
    ("windows", "turned"),
    [(1, False), (4, None), (6, True), (GAPS, True), (GAPS, None), (ROWS, False)],
    ids=["1, halves", "4", "6, interleaved", "gaps, interleaved", "gaps", "rows, halves"],
)
def test_gradcheck(windows, turned):
    key, value = rows_of((2, 2, 6, 7)), rows_of((2, 3, 6, 2), seed=1)
    how = {}
    if turned is not None:
        count = windows if isinstance(windows, torch.Tensor) else -(-6 // windows)
        how = rotation(count, 6, turned)

    def pool(k, v):
        return gistkit.window_pool(k, v, windows=windows, **how)

    assert torch.autograd.gradcheck(pool, (key, value))


def test_second_derivatives():
    key, value = rows_of((2, 2, 6, 7)), rows_of((2, 1, 6, 2), seed=1)

    def pool(k, v):
        out = gistkit.window_pool(k, v, windows=GAPS, **rotation(GAPS, 4))
        return out[0].pow(2), out[1].pow(3)

    assert torch.autograd.gradgradcheck(pool, (key, value))


def gradients(form, inputs, weights, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(form(*inputs, **options), inputs, weights)


CASES = {
    "llama": ((1, 2, 83, 128), (1, 2, 83, 128), 8, 128),
    "odd": ((3, 1, 37, 19), (3, 4, 37, 5), 5, 10),
    "whole": ((2, 2, 61, 33), (2, 2, 61, 64), 61, 32),
    "ragged": ((2, 2, 61, 48), (2, 2, 61, 48), torch.tensor([[3, 4, 40, 40], [0, 1, 3, 61]]), 48),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parity(isa, case, dtype, turned):
    key_shape, value_shape, windows, rotary = CASES[case]
    inputs = rows_of(key_shape, dtype), rows_of(value_shape, dtype, 1)
    outputs = gistkit.window_pool(*inputs, windows=windows)
    weights = [rows_of(x.shape, dtype, 2).detach() for x in outputs]
    options = dict(windows=windows)
    if turned:
        options |= rotation(outputs[0].shape[2], rotary)
    exact = gradients(reference.window_pool, [x.double() for x in inputs], [w.double() for w in weights], **options)
    plain = gradients(reference.window_pool, inputs, weights, **options)
    got = gradients(gistkit.window_pool, inputs, weights, **options)
    # In float64 the truth's own angles are rounded.
    assert_as_good(got, plain, exact, 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps)


def test_large_gradients_are_the_same(isa):
    """Large enough that rows are written past the caches, aligned or not."""
    for dim, dtype in ((128, torch.float32), (72, torch.float32), (64, torch.bfloat16), (72, torch.bfloat16)):
        tokens = 2**24 // (2 * dim * dtype.itemsize) + 11
        grad = rows_of((1, 2, 5, dim), dtype).detach()
        offsets = torch.tensor([[3, 4, 1000, 1001, tokens - 500, tokens - 2]])
        got, _ = OPS.window_spread(grad, grad[:, :0], offsets, None, None, 1.0, False, tokens, False)
        assert not got[:, :, :3].any() and not got[:, :, -2:].any()
        lengths = offsets.diff()[0]
        computed = (grad.float() / lengths[:, None]).to(dtype)
        expected = computed.repeat_interleave(lengths, dim=2)
        torch.testing.assert_close(got[:, :, 3:-2], expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_expanded_and_strided_gradients():
    inputs = rows_of((2, 3, 7, 8)), rows_of((2, 3, 7, 8), seed=1)
    options = dict(windows=3, **rotation(3, 6))
    exact = gradients(reference.window_pool, inputs, [torch.ones(2, 3, 3, 8, dtype=torch.float64)] * 2, **options)
    ones = torch.ones((), dtype=torch.float64).expand(2, 3, 3, 8)
    columns = ones.mT.contiguous().mT
    for weights in (ones, columns):
        for got, truth in zip(gradients(gistkit.window_pool, inputs, [weights] * 2, **options), exact, strict=True):
            torch.testing.assert_close(got, truth, rtol=0, atol=1e-14)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(wanted):
    inputs = [rows_of((2, 3, 7, 8)).detach(), rows_of((2, 3, 7, 8), seed=1).detach()]
    inputs[wanted].requires_grad_()
    found = []
    for form in (gistkit.window_pool, reference.window_pool):
        out = form(*inputs, windows=3)
        found += torch.autograd.grad(out[wanted].sin().sum(), inputs[wanted])
    torch.testing.assert_close(*found, rtol=0, atol=1e-14)


def test_gradients_of_hidden_states():
    hidden = rows_of((2, 7, 8))
    out = gistkit.window_pool(hidden, windows=ROWS)
    (got,) = torch.autograd.grad(out.sin().sum(), hidden)
    (expected,) = torch.autograd.grad(reference.window_pool(hidden, windows=ROWS).sin().sum(), hidden)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_a_gradient_has_the_memory_order_of_its_input():
    key = rows_of((2, 7, 3, 8)).detach().transpose(1, 2).requires_grad_()
    gistkit.window_pool(key, windows=2).sum().backward()
    assert key.grad.stride() == key.stride()


def test_rows_are_not_saved():
    key = rows_of((1, 2, 50, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        gistkit.window_pool(key, windows=25, **rotation(2, 8))
    assert sum(saved) == 3 + 2 + 4


def test_bits_do_not_depend_on_threads():
    inputs = rows_of((2, 8, 301, 64), torch.float32), rows_of((2, 8, 301, 64), torch.float32, 1)
    weights = [rows_of((2, 8, 43, 64), torch.float32, 2).detach()] * 2

    def run():
        out = gistkit.window_pool(*inputs, windows=7, **rotation(43, 64))
        return *out, *torch.autograd.grad(out, inputs, weights)

    assert_same_for_any_number_of_threads(run)


@pytest.mark.parametrize(
    ("offsets", "turned"),
    [(GAPS[None], True), pytest.param(ROWS, False, marks=pytest.mark.slow)],
    ids=["shared", "rows"],
)
def test_opcheck(offsets, turned):
    key, value = rows_of((2, 2, 6, 7)), rows_of((2, 3, 6, 2), seed=1)
    angles = (torch.rand(2, 2, dtype=torch.float64), frequencies(6)) if turned else (None, None)
    torch.library.opcheck(OPS.window_pool.default, (key, value, offsets, *angles, 1.2, True))
    windows = key[:, :, :2].detach().requires_grad_(), value[:, :, :2].detach().requires_grad_()
    # Of either order in memory.
    torch.library.opcheck(OPS.window_spread.default, (*windows, offsets, *angles, 1.2, False, 6, turned))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_once_for_all_shapes(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def pool(key, value, offsets, positions, inv_freq):
        pooled = gistkit.window_pool(key * 2, windows=3)
        return pooled, *gistkit.window_pool(key, value, windows=offsets, positions=positions, inv_freq=inv_freq)

    compiled = []
    for batch, heads, tokens, dim, count in ((2, 3, 11, 8, 5), (3, 5, 23, 16, 7)):
        key = rows_of((batch, heads, tokens, dim), torch.float32)
        value = rows_of((batch, heads, tokens, dim), torch.float32, 1)
        offsets = torch.arange(count + 1)
        positions, inv_freq = torch.rand(count), frequencies(dim)
        got = pool(key, value, offsets, positions, inv_freq)
        expected = pool._torchdynamo_orig_callable(key, value, offsets, positions, inv_freq)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
        mine, plain = (torch.autograd.grad([x.sin().sum() for x in out], (key, value)) for out in (got, expected))
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b)
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[1]
