"""What is not a finite number reaches the rows that see it, and the keys that such rows see, and nothing else."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

import gistkit
from gistkit import Plan, layouts, window_pool
from gistkit.nn import DigitTrie
from gistkit.ops import ancestor_attention, trie_mix
from tests.helpers.isas import BEYOND, ISAS
from tests.helpers.nonfinite import BAD, PLANS, check, gathered_attention, random_spans, run, spoiled
from tests.ops.test_attention import by_isa

# Each set of kernels once, with what it computes in.
by_kernels = pytest.mark.parametrize(
    ("attention_isa", "dtype"),
    [*((isa, torch.float32) for isa in ISAS), *((isa, torch.bfloat16) for isa in BEYOND)],
    indirect=["attention_isa"],
    ids=str,
)


def compare(plan: Plan, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], **options: bool) -> None:
    """Under one thread and two, which give the same bits."""
    softcap = 2.0 if options.get("softcap") else None
    before = torch.get_num_threads()
    bias = options.get("bias", False)
    for what, inputs, grad_out, grad_lse in spoiled(plan, dtype, *heads, *dims, bias=bias, seed=plan.num_queries):
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(run(inputs, grad_out, grad_lse, plan, softcap))
            torch.set_num_threads(before)
        check(found[0], gathered_attention(inputs, grad_out, grad_lse, plan, softcap), dtype, what)
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@by_kernels
@pytest.mark.parametrize(
    ("rows", "heads", "dims"),
    [(4, (4, 2), (32, 40)), (16, (1, 1), (128, 128)), (96, (2, 1), (64, 64)), (200, (1, 1), (33, 64))],
    ids=lambda x: x if isinstance(x, int) else "",
)
def test_random_spans(
    rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, attention_isa: str
) -> None:
    plan = random_spans(rows, max(200, rows), 2, torch.Generator().manual_seed(rows))
    compare(plan, dtype, heads, dims)


@by_isa(torch.float64, torch.bfloat16, torch.float16)
@pytest.mark.parametrize(("rows", "dims"), [(1, (64, 64)), (70, (33, 40))], ids=["one", "tiles"])
def test_random_spans_of_other_dtypes(rows: int, dims: tuple[int, int], dtype: torch.dtype, attention_isa: str) -> None:
    compare(random_spans(rows, 150, 2, torch.Generator().manual_seed(rows)), dtype, (1, 1), dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["causal", "gist", "dodo"])
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    compare(PLANS[layout](), dtype, (1, 1), (32, 32))


@by_kernels
@pytest.mark.parametrize(("rows", "softcap"), [(4, True), (70, False), (70, True)])
def test_a_key_whose_bias_is_minus_infinity_is_not_seen(
    rows: int, softcap: bool, dtype: torch.dtype, attention_isa: str
) -> None:
    plan = random_spans(rows, 150, 2, torch.Generator().manual_seed(rows))
    compare(plan, dtype, (2, 1), (32, 32), bias=True, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_bias_of_zeros(dtype: torch.dtype) -> None:
    plan = PLANS["gist"]()
    for what, inputs, grad_out, grad_lse in spoiled(plan, dtype, 2, 1, 32, 32, bias=True, seed=1):
        inputs[3].zero_()
        got = run(inputs, grad_out, grad_lse, plan)
        check(got, gathered_attention(inputs, grad_out, grad_lse, plan), dtype, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_bad_number_from_above_costs_little(dtype: torch.dtype, one_thread: None) -> None:
    length = 1024
    plan = layouts.causal(length).compile()
    inputs = [torch.randn(1, 1, length, 64).to(dtype).requires_grad_() for _ in range(3)]
    out, took = gistkit.attention(*inputs, plan), {}
    for bad in (0.0, math.nan, math.inf):
        upstream = torch.randn(out.shape).to(dtype)
        upstream[0, 0, length // 2, 3] = bad
        times = []
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.grad(out, inputs, upstream, retain_graph=True)
            times.append(time.perf_counter() - start)
        took[bad] = min(times)
    assert max(took.values()) < 5 * took[0.0], took


def finite_rows(t: Tensor) -> Tensor:
    return t.isfinite().flatten(1).all(1)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_window_pool(bad: float, isa: str) -> None:
    key = torch.randn(1, 1, 50, 24)
    key[0, 0, 11] = bad
    key.requires_grad_()
    offsets = torch.tensor([0, 10, 13, 45, 50])
    options = {"windows": offsets, "positions": torch.arange(4.0), "inv_freq": torch.rand(6)}
    out = window_pool(key, **options)
    assert finite_rows(out[0, 0]).tolist() == [True, False, True, True]
    upstream = torch.randn(1, 1, 4, 24)
    upstream[0, 0, 2] = bad
    (grad,) = torch.autograd.grad(out, key, upstream)
    assert finite_rows(grad[0, 0]).tolist() == [not 13 <= i < 45 for i in range(50)]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_trie_mix(bad: float, isa: str) -> None:
    paths = DigitTrie.of(torch.randint(0, 7**4, (40,)), base=7, digits=4).paths
    nodes, symbols = len(paths.rows), len(paths.offsets) - 1
    own = torch.stack([row[row >= 0][-1] for row in paths.rows])
    for symbol, node in ((0, nodes - 1), (symbols - 1, 3)):
        weights, table = torch.randn(*paths.rows.shape, 2), torch.randn(symbols, 2, 19)
        table[symbol] = bad
        inputs = [t.requires_grad_() for t in (weights, table, torch.randn(symbols, 19))]
        out = trie_mix(*inputs, paths)
        reads = (paths.rows == symbol).any(1)
        assert torch.equal(finite_rows(out), ~reads)
        upstream = torch.randn(nodes, 19)
        upstream[node] = bad
        by_weights, by_table, by_base = torch.autograd.grad(out, inputs, upstream)
        at = paths.rows == symbol
        at[node] |= paths.rows[node] >= 0
        assert torch.equal(by_weights.isfinite().all(-1), ~at)
        assert torch.equal(finite_rows(by_table), ~torch.isin(torch.arange(symbols), paths.rows[node]))
        assert torch.equal(finite_rows(by_base), torch.arange(symbols) != own[node])


@pytest.mark.parametrize(("which", "bad"), list(enumerate([math.nan, *BAD])))
def test_ancestor_attention(which: int, bad: float, isa: str) -> None:
    """A query sees keys of its row; what it sees, and they in turn, are all that a number reaches."""
    ancestors = DigitTrie.of(torch.randint(0, 7**4, (40,)), base=7, digits=4).ancestors
    count = len(ancestors.rows)
    tensors = [torch.randn(count, 2, 9) for _ in range(4)]
    row = count - 2 if which in (0, 3) else int(ancestors.rows[count - 2].max())
    tensors[which][row] = bad
    out = ancestor_attention(*(t.requires_grad_() for t in tensors[:3]), ancestors)
    by_query, by_key, by_value = torch.autograd.grad(out, tensors[:3], tensors[3])
    sees = torch.zeros(count, count, dtype=torch.bool)
    for n, its in enumerate(ancestors.rows):
        sees[n, its[its >= 0].long()] = True
    rows = sees[:, row] if which in (1, 2) else torch.arange(count) == row
    assert 0 < rows.sum() < count
    assert finite_rows(out)[~rows].all() and finite_rows(by_query)[~rows].all()
    reached = sees[rows].any(0)
    assert finite_rows(by_key)[~reached].all() and finite_rows(by_value)[~reached].all()
    if math.isnan(bad):
        assert not finite_rows(by_query)[rows].any()
