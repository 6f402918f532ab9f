"""The CUDA kernels of a trie's encoder on a GPU: the cases of the CPU tests, a full range of positions, equal bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_cuda import gpu
from test_trie_ops import SIZES, TRIES, assert_as_good, rows_of
from torch import Tensor

from gistkit.layouts import DigitTrie, Links
from gistkit.ops import ancestor_attention, bias_gelu, reference, trie_mix

DEVICE = "cuda"


def on_gpu(op: Callable[..., Tensor], links: Links | None = None) -> Callable[..., Tensor]:
    """The op computed on a GPU, for inputs and results on the CPU; gradients flow through."""
    more = [] if links is None else [Links(*(x.to(DEVICE) for x in links))]
    return lambda *inputs: op(*(x.to(DEVICE) for x in inputs), *more).cpu()


@gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", TRIES)
def test_trie_mix(name: str, size: tuple[int, int]) -> None:
    trie = TRIES[name]()
    for links in (trie.paths, trie.leaf_paths):
        symbols = len(links.offsets) - 1
        inputs = rows_of(*links.rows.shape, size[0]), rows_of(symbols, *size), rows_of(symbols, size[1])
        assert_as_good(on_gpu(trie_mix, links), lambda *x, rows=links.rows: reference.trie_mix(*x, rows), *inputs)


@gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", TRIES)
def test_ancestor_attention(name: str, size: tuple[int, int]) -> None:
    trie = TRIES[name]()
    for links in (trie.ancestors, trie.leaf_ancestors):
        inputs = [rows_of(count, *size) for count in (len(links.rows), trie.nodes, trie.nodes)]
        fast = on_gpu(ancestor_attention, links)
        assert_as_good(fast, lambda *x, rows=links.rows: reference.ancestor_attention(*x, rows), *inputs)


@gpu
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 1), (700, 33), (37, 3072), (1000, 64)])
def test_bias_gelu(rows: int, columns: int) -> None:
    x, bias, scale = rows_of(rows, columns), rows_of(columns), rows_of(rows)
    assert_as_good(on_gpu(bias_gelu), reference.bias_gelu, x, bias)
    assert_as_good(on_gpu(bias_gelu), reference.bias_gelu, x, bias, scale)


@gpu
def test_a_full_range_of_positions() -> None:
    """As the CPU's kernels within rounding, and the same bits every time: lists of 1 to 21,111 entries."""
    trie = DigitTrie.of(torch.arange(16384))
    symbols = len(trie.paths.offsets) - 1
    cases = [
        (trie_mix, trie.paths, [(*trie.paths.rows.shape, 12), (symbols, 12, 768), (symbols, 768)]),
        (ancestor_attention, trie.ancestors, [(trie.nodes, 12, 64)] * 3),
        (bias_gelu, None, [(trie.nodes, 768), (768,), (trie.nodes,)]),
    ]
    for op, links, shapes in cases:
        inputs = [rows_of(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
        found = []
        for compute in (
            op if links is None else lambda *x, op=op, links=links: op(*x, links),
            *[on_gpu(op, links)] * 3,
        ):
            out = compute(*inputs)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            found.append((out.detach(), *torch.autograd.grad(out, inputs, grad)))
        for cpu, first, *others in zip(*found, strict=True):
            assert (first - cpu).abs().max() <= 1e-5 * cpu.abs().max()
            assert all(torch.equal(first, other) for other in others)
