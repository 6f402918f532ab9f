"""A torch without the names that it keeps to itself: ops give the same, and refuse the same."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from gistkit import ops
from gistkit.layouts import causal
from gistkit.ops import _private


@pytest.fixture
def without(monkeypatch):
    """Every module of the package that has such a name has what stands in for it."""
    plain = vars(_private.found_in(SimpleNamespace(), SimpleNamespace()))
    modules = [module for name, module in sys.modules.items() if name.startswith("gistkit.ops.")]
    changed = [(module, name) for module in modules for name in plain if name in vars(module)]
    for module, name in changed:
        monkeypatch.setattr(module, name, plain[name])
    assert {name for _, name in changed} == set(plain)


def passes():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3))
    inv_freq = torch.tensor([1.0, 0.5, 0.1, 0.01])
    plan = causal(7).compile()
    turned, keys = ops.rope(query, key, torch.arange(7), inv_freq)
    out = ops.attention(turned, keys, value, plan)
    pooled = ops.window_pool(keys, value, windows=torch.tensor([0, 3, 7]))
    (out.square().sum() + sum(part.sum() for part in pooled)).backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = ops.attention(*ops.rope(query, key, torch.arange(7), inv_freq), value, plan)
    with torch.no_grad():
        plain = ops.attention(*ops.rope(query, key, torch.arange(7), inv_freq), value, plan)
    return [out.detach(), *pooled, query.grad, key.grad, value.grad, half, plain]


def test_ops_give_the_same_without_torchs_own_names(without, monkeypatch):
    found = passes()
    monkeypatch.undo()
    for one, other in zip(found, passes(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_forward_mode_is_still_refused(without):
    query = torch.randn(1, 2, 7, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match="attention: forward-mode differentiation"):
            ops.attention(dual, query, query, causal(7).compile())
    ops.attention(query, query, query, causal(7).compile())


def test_compiled_code_runs(without):
    query, plan = torch.randn(1, 2, 7, 8), causal(7).compile()
    made = torch.compile(lambda x: 2 * ops.attention(x, x, x, plan), backend="eager")(query)
    assert torch.equal(made, 2 * ops.attention(query, query, query, plan))


@pytest.mark.slow
def test_a_torch_without_names_that_are_read_once_loads():
    code = """
import torch._dynamo
del torch._disable_dynamo, torch._C._dispatch_get_all_op_names
from gistkit.nn import SeqPE
encoder = SeqPE(16, digits=2, heads=2).eval()
with torch.no_grad(), encoder.frozen():
    print(tuple(encoder(torch.arange(5)).shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "(5, 16)\n", done.stderr
