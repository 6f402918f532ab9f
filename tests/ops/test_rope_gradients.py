"""rope backward: gradcheck, parity with autograd of the plain form, opcheck, compile, determinism."""

import pytest
import torch
import torch._dynamo.testing

import gistkit
from gistkit.ops import reference
from tests.helpers.devices import assert_as_good
from tests.helpers.threads import assert_same_for_any_number_of_threads

OPS = torch.ops.gistkit


def inputs(shape, dtype=torch.float64, axes=1, heads=1, seed=0, shared_positions=False):
    """query, key, positions and inv_freq, all of which require grad."""
    batch, queries, keys, tokens, dim, rotary = shape
    generator = torch.Generator().manual_seed(seed)
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    query = torch.randn(batch, queries, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)
    key = torch.randn(batch, keys, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)
    rows = 1 if shared_positions else batch
    positions = torch.randn(axes, rows, tokens, generator=generator, dtype=torch.float64).to(angle_dtype)
    inv_freq = torch.rand(heads, axes, rotary // 2, generator=generator, dtype=torch.float64).to(angle_dtype)
    return tuple(x.requires_grad_() for x in (query, key, positions, inv_freq))


CASES = {
    "plain": dict(shape=(2, 3, 1, 4, 6, 6)),
    "partial": dict(shape=(1, 2, 2, 3, 7, 4)),
    "axes": dict(shape=(2, 2, 1, 3, 4, 4), axes=3),
    "per head": dict(shape=(2, 3, 3, 3, 4, 4), axes=2, heads=3),
    "shared positions": dict(shape=(3, 2, 1, 3, 4, 4), shared_positions=True),
    "no keys": dict(shape=(1, 2, 0, 3, 4, 4), axes=2, heads=2),
}


@pytest.mark.parametrize(("case", "interleaved"), list(zip(CASES, [True, False] * 3, strict=True)))
def test_gradcheck(case, interleaved):
    def turn(*tensors):
        return gistkit.rope(*tensors, scaling=1.3, interleaved=interleaved)

    assert torch.autograd.gradcheck(turn, inputs(**CASES[case]))


def test_gradcheck_of_the_inverse():
    assert torch.autograd.gradcheck(lambda *x: OPS.rope(*x, 1.3, False, True), inputs((2, 2, 1, 3, 6, 4), axes=2))


def test_second_derivatives_of_heads():
    query, key, positions, inv_freq = inputs((2, 2, 1, 3, 6, 4))

    def turn(q, k):
        out = gistkit.rope(q, k, positions.detach(), inv_freq.detach(), scaling=1.3)
        return out[0].pow(2), out[1].pow(3)

    assert torch.autograd.gradgradcheck(turn, (query, key))


def test_second_derivatives_of_angles_are_refused():
    tensors = inputs((1, 1, 1, 3, 4, 4))
    out, _ = gistkit.rope(*tensors)
    (first,) = torch.autograd.grad(out.pow(2).sum() + out.sum(), tensors[3], create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative by inv_freq or positions"):
        first.sum().backward()


def gradients(rope, tensors, weights, **options):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = rope(*tensors, **options)
    return torch.autograd.grad(out, tensors, weights)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        dict(shape=(2, 8, 2, 67, 32, 32)),
        dict(shape=(1, 4, 4, 301, 80, 48), axes=2, heads=4),
        dict(shape=(3, 2, 1, 1, 17, 10), axes=2, shared_positions=True),
    ],
    ids=["gqa", "per head", "shared"],
)
def test_parity(isa, case, dtype, interleaved):
    tensors = inputs(**case, dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(x.shape, generator=generator).to(dtype) for x in tensors[:2]]
    options = dict(scaling=0.8, interleaved=interleaved)
    exact = gradients(reference.rope, [x.double() for x in tensors], [w.double() for w in weights], **options)
    plain = gradients(reference.rope, tensors, weights, **options)
    got = gradients(gistkit.rope, tensors, weights, **options)
    # In float64 the truth's own angles are rounded.
    assert_as_good(got, plain, exact, 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps)


def test_expanded_and_strided_gradients():
    tensors = inputs((2, 3, 1, 5, 8, 6))
    exact = gradients(reference.rope, tensors, [torch.ones(x.shape, dtype=x.dtype) for x in tensors[:2]])
    ones = [torch.ones((), dtype=x.dtype).expand(x.shape) for x in tensors[:2]]
    columns = [x.contiguous().transpose(-1, -2).contiguous().transpose(-1, -2) for x in ones]
    for weights in (ones, columns):
        for got, truth in zip(gradients(gistkit.rope, tensors, weights), exact, strict=True):
            torch.testing.assert_close(got, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone(wanted):
    tensors = [x.detach() for x in inputs((2, 3, 3, 5, 8, 6), axes=2, heads=3)]
    tensors[wanted].requires_grad_()
    for rope in (gistkit.rope, reference.rope):
        out = rope(*tensors)
        sum((x.sin().sum() for x in out if x.requires_grad), torch.zeros(())).backward()
    once = tensors[wanted].grad / 2
    tensors[wanted].grad = None
    sum(x.sin().sum() for x in reference.rope(*tensors)).backward()
    torch.testing.assert_close(once, tensors[wanted].grad, rtol=0, atol=1e-13)


def test_heads_are_saved_only_for_angles():
    query, key, positions, inv_freq = inputs((1, 2, 1, 5, 8, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        gistkit.rope(query, key, positions.detach(), inv_freq.detach())
    assert sum(saved) == positions.numel() + inv_freq.numel()


def test_bits_do_not_depend_on_threads():
    tensors = inputs((2, 8, 2, 301, 64, 64), dtype=torch.float32, axes=2, shared_positions=True)
    weights = [x.detach().cos() for x in tensors[:2]]

    def run():
        out = gistkit.rope(*tensors)
        return *out, *torch.autograd.grad(out, tensors, weights)

    assert_same_for_any_number_of_threads(run)


@pytest.mark.parametrize("case", ["per head", pytest.param("no keys", marks=pytest.mark.slow)])
def test_opcheck(case):
    query, key, positions, inv_freq = inputs(**CASES[case])
    torch.library.opcheck(OPS.rope.default, (query, key, positions, inv_freq, 1.2, False, False))
    constants = [x.detach() for x in (query, key, positions, inv_freq)]
    torch.library.opcheck(OPS.rope_angle_grad.default, (*constants[:2], *constants, 1.2, False, True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_once_for_all_shapes(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def turn(query, key, positions, inv_freq):
        return gistkit.rope(query * 2, key, positions, inv_freq, scaling=1.5)

    for shape in ((2, 4, 2, 5, 8, 6), (3, 6, 3, 11, 16, 10)):
        tensors = inputs(shape, dtype=torch.float32)
        got = torch.autograd.grad([x.sin().sum() for x in turn(*tensors)], tensors)
        plain = gistkit.rope(tensors[0] * 2, *tensors[1:], scaling=1.5)
        expected = torch.autograd.grad([x.sin().sum() for x in plain], tensors)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)
    assert counter.frame_count == 1


def test_compiles_with_integer_positions():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def turn(query, key, positions, inv_freq):
        query, key = gistkit.rope(query + 1, key + 1, positions, inv_freq)
        return query, gistkit.rerotate(key, 3, inv_freq)

    query, key, _, inv_freq = (x.detach() for x in inputs((2, 2, 1, 5, 8, 8)))
    got = turn(query, key, torch.arange(5), inv_freq)
    rotated = gistkit.rope(query + 1, key + 1, torch.arange(5), inv_freq)
    expected = rotated[0], gistkit.rerotate(rotated[1], 3, inv_freq)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
