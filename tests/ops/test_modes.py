"""Autocast and forward-mode differentiation: what the ops do, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gistkit
from gistkit.layouts.links import Links
from gistkit.ops import ancestor_attention, bias_gelu, rerotate, rope, trie_mix, window_pool
from tests.ops.test_attention import causal_plan

Op = Callable[[Tensor], Tensor]
LENGTH = 9
CAUSAL = causal_plan(LENGTH)
LINKS = Links.grouped(np.array([[0, 1], [1, 2]], np.int32), 3)


def heads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, LENGTH, 8, generator=g).to(dtype) for _ in range(3)]


Q, K, V = heads()
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1, 0.01])
OPS: dict[str, tuple[Op, Tensor]] = {
    "attention": (lambda x: gistkit.attention(x, K, V, CAUSAL), Q),
    "rope": (lambda x: rope(x, K, torch.arange(LENGTH), FREQUENCIES)[0], Q),
    "window_pool": (lambda x: window_pool(x, windows=3), Q),
    "trie_mix": (lambda x: trie_mix(x, torch.ones(3, 2, 4), torch.ones(3, 4), LINKS), torch.ones(2, 2, 2)),
    "ancestor_attention": (
        lambda x: ancestor_attention(x, torch.ones(3, 2, 4), torch.ones(3, 2, 4), LINKS),
        torch.ones(2, 2, 4),
    ),
    "bias_gelu": (lambda x: bias_gelu(x, torch.ones(4)), torch.ones(3, 4)),
}


def by_dual(function: Op, x: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, torch.ones_like(x)))


def by_dual_of_a_leaf(function: Op, x: Tensor) -> None:
    by_dual(function, x.clone().requires_grad_())


def without_gradients(function: Op, x: Tensor) -> None:
    with torch.no_grad():
        by_dual(function, x)


def by_dual_upstream(function: Op, x: Tensor) -> None:
    """Forward over reverse: only the gradient from above has a tangent."""
    x = x.clone().requires_grad_()
    out = function(x)
    with forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


WAYS: dict[str, Callable[[Op, Tensor], object]] = {
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
    "jvp of vmap": lambda function, x: torch.func.jvp(torch.func.vmap(function), (x[None],), (x[None],)),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "an outer jvp": lambda function, x: torch.func.jvp(
        lambda y: torch.func.jvp(lambda z: function(y).sum() * z, (x.sum(),), (x.sum(),))[1], (x,), (x,)
    ),
    "dual": by_dual,
    "leaf": by_dual_of_a_leaf,
    "no_grad": without_gradients,
    "upstream": by_dual_upstream,
}


@pytest.mark.parametrize("name", OPS)
def test_forward_mode_is_refused_by_name(name: str) -> None:
    for way in WAYS.values():
        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode differentiation .* not implemented"):
            way(*OPS[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's vmap calls the op row by row
@pytest.mark.parametrize("name", OPS)
def test_transforms_of_reverse_mode_are_autograd(name: str) -> None:
    function, x = OPS[name]
    out = function(leaf := x.clone().requires_grad_())
    jacobian = torch.stack(
        [torch.autograd.grad(out, leaf, row, True)[0] for row in torch.eye(out.numel()).view(-1, *out.shape)]
    )
    total = lambda y: function(y).sum()  # noqa: E731
    torch.testing.assert_close(torch.func.jacrev(function)(x).flatten(0, out.dim() - 1), jacobian)
    torch.testing.assert_close(torch.func.grad(total)(x), jacobian.sum(0))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(torch.stack([x, x]))[1], jacobian.sum(0))


@pytest.mark.parametrize("name", ["attention", "trie_mix", "ancestor_attention", "bias_gelu"])
def test_a_gradient_of_the_gradient_is_refused(name: str) -> None:
    function, x = OPS[name]
    total = lambda y: function(y).square().sum()  # noqa: E731
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(x), x, create_graph=True)
    for way in (
        lambda: torch.autograd.grad(grad.sum(), x),
        lambda: torch.func.grad(lambda y: torch.func.grad(total)(y).sum())(x.detach()),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}: the gradient's own gradient .* not implemented"):
            way()


def test_forward_mode_compiled_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.func.jvp(OPS["attention"][0], (x,), (x,))[1], backend="eager")
    with pytest.raises(NotImplementedError, match="attention: forward-mode"):
        compiled(Q)


def test_ops_on_constants_take_part_in_forward_mode() -> None:
    constant = gistkit.attention(2 * Q, K, V, CAUSAL)
    value, slope = torch.func.jvp(
        lambda x: x * gistkit.attention(2 * Q, K, V, CAUSAL), (Q,), (torch.full_like(Q, 3.0),)
    )
    torch.testing.assert_close((value, slope), (Q * constant, 3 * constant))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_follows_autocast_as_sdpa_does(dtype: torch.dtype) -> None:
    """Mixed inputs too; gradients come in the inputs' dtypes."""
    given = [
        t.to(d, copy=True).requires_grad_()
        for t, d in zip((Q, K, V), (torch.float32, dtype, torch.float32), strict=True)
    ]
    with torch.autocast("cpu", dtype):
        got = gistkit.attention(*given, CAUSAL)
        bias = torch.zeros(1, 1, LENGTH, dtype=dtype)
        dense = gistkit.ops.attention_with_dropout(*given, CAUSAL, dropout=0.0, key_bias=bias)
        sdpa = F.scaled_dot_product_attention(*given, is_causal=True)
    assert got.dtype == dense.dtype == sdpa.dtype == dtype
    torch.testing.assert_close(got, dense, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, given, upstream)
    cast = [t.detach().to(dtype).requires_grad_() for t in given]
    out = gistkit.attention(*cast, CAUSAL)
    assert torch.equal(got, out)
    for grad, source, expected in zip(grads, given, torch.autograd.grad(out, cast, upstream), strict=True):
        assert grad.dtype == source.dtype and torch.equal(grad, expected.to(source.dtype))
    torch.testing.assert_close(got, sdpa, rtol=2e-2, atol=2e-2)


def test_autocast_leaves_float64_and_where_it_is_off() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert gistkit.attention(*heads(torch.float64), CAUSAL).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert gistkit.attention(Q, K, V, CAUSAL).dtype == torch.float32
            with pytest.raises(TypeError, match="key: expected query's dtype"):
                gistkit.attention(Q, K.bfloat16(), V, CAUSAL)


def test_a_bias_of_keys_stays_float32_under_autocast() -> None:
    bias = torch.linspace(-1, 1, LENGTH).bfloat16()[None, None]
    with torch.autocast("cpu", torch.bfloat16):
        got = [gistkit.attention(Q, K, V, CAUSAL, key_bias=b, return_lse=True) for b in (bias, bias.float())]
    expected = gistkit.attention(*heads(torch.bfloat16), CAUSAL, key_bias=bias.float(), return_lse=True)
    for out, lse in got:
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_rope_and_window_pool_follow_autocast() -> None:
    low = [t.bfloat16() for t in (Q, K, V)]
    positions = torch.arange(LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        rotated = rope(Q, low[1], positions, FREQUENCIES)
        pooled = window_pool(K, low[2], windows=3)
        moved = rerotate(Q, 2, FREQUENCIES)
        hidden = window_pool(Q[:, 0], windows=2)
    assert all(torch.equal(a, b) for a, b in zip(rotated, rope(*low[:2], positions, FREQUENCIES), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(pooled, window_pool(*low[1:], windows=3), strict=True))
    assert torch.equal(moved, rerotate(low[0], 2, FREQUENCIES))
    assert torch.equal(hidden, window_pool(low[0][:, 0], windows=2))


def test_ops_of_the_trie_stay_float32_under_autocast() -> None:
    for name in ("trie_mix", "ancestor_attention", "bias_gelu"):
        function, x = OPS[name]
        with torch.autocast("cpu", torch.bfloat16):
            got = function(x.bfloat16())
        assert got.dtype == torch.float32 and torch.equal(got, function(x)), name


@pytest.mark.slow
def test_autocast_compiles_whole() -> None:
    torch._dynamo.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q, k = rope(q, k, torch.arange(LENGTH), FREQUENCIES)
            return gistkit.attention(q, k, window_pool(v, windows=1), CAUSAL)

    given = [t.requires_grad_() for t in heads()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, expected = compiled(*given), layer(*given)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)
    for a, b in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)

    # The mode at the time of the call decides, not that of the first one.
    attend = torch.compile(lambda q, k, v: gistkit.attention(q, k, v, CAUSAL), fullgraph=True, backend="aot_eager")
    assert attend(*given).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*given).dtype == torch.bfloat16


@pytest.mark.parametrize("name", OPS)
def test_unrecorded_calls_leave_autograd_as_it_was(name: str) -> None:
    """They dispatch past autograd, also where they are refused, and modes still see them."""
    function, x = OPS[name]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            function(x)
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                function(x.int())
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert not function(leaf).requires_grad
    (grad,) = torch.autograd.grad(function(leaf).sum(), leaf)
    assert grad.shape == leaf.shape

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Names():
        function(x)
    assert f"gistkit::{name}" in seen
