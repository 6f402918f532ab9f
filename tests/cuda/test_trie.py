"""The CUDA kernels of a trie's encoder on a GPU: the cases of the CPU tests, a full range of positions, equal bits.

The bodies run on the CPU too, with fewer cases.
"""

from __future__ import annotations

import pytest
import torch

from gistkit.nn import DigitTrie
from gistkit.ops import ancestor_attention, bias_gelu, reference, trie_mix
from tests.helpers.devices import GPU, grid, on
from tests.ops.test_trie import SIZES, TRIES, assert_as_good, rows_of


@grid("name,size", TRIES, SIZES)
def test_trie_mix(device: str, name: str, size: tuple[int, int]) -> None:
    trie = TRIES[name]()
    for links in (trie.paths, trie.leaf_paths):
        symbols = len(links.offsets) - 1
        inputs = rows_of(*links.rows.shape, size[0]), rows_of(symbols, *size), rows_of(symbols, size[1])
        fast = lambda *x, links=links: on(device, trie_mix)(*x, links)  # noqa: E731
        assert_as_good(fast, lambda *x, rows=links.rows: reference.trie_mix(*x, rows), *inputs, linear=True)


@grid("name,size", TRIES, SIZES)
def test_ancestor_attention(device: str, name: str, size: tuple[int, int]) -> None:
    trie = TRIES[name]()
    for links in (trie.ancestors, trie.leaf_ancestors):
        inputs = [rows_of(count, *size) for count in (len(links.rows), trie.nodes, trie.nodes)]
        fast = lambda *x, links=links: on(device, ancestor_attention)(*x, links)  # noqa: E731
        assert_as_good(fast, lambda *x, rows=links.rows: reference.ancestor_attention(*x, rows), *inputs)


@grid("size", [(0, 5), (1, 1), (700, 33), (37, 3072), (1000, 64)])
def test_bias_gelu(device: str, size: tuple[int, int]) -> None:
    x, bias, scale = rows_of(*size), rows_of(size[1]), rows_of(size[0])
    assert_as_good(on(device, bias_gelu), reference.bias_gelu, x, bias)
    assert_as_good(on(device, bias_gelu), reference.bias_gelu, x, bias, scale)


@pytest.mark.parametrize(("device", "positions"), [("cpu", 700), pytest.param("cuda", 16384, marks=GPU)])
def test_a_full_range_of_positions(device: str, positions: int) -> None:
    """As float64 within rounding, and the same bits every time: lists of 1 to 21,111 entries."""
    trie = DigitTrie.of(torch.arange(positions))
    symbols = len(trie.paths.offsets) - 1
    cases = [
        (trie_mix, trie.paths, [(*trie.paths.rows.shape, 12), (symbols, 12, 768), (symbols, 768)]),
        (ancestor_attention, trie.ancestors, [(trie.nodes, 12, 64)] * 3),
        (bias_gelu, None, [(trie.nodes, 768), (768,), (trie.nodes,)]),
    ]
    for op, links, shapes in cases:
        inputs = [rows_of(*shape) for shape in shapes]
        more = () if links is None else (links,)
        found = []
        for where, dtype in (("cpu", torch.float64), *[(device, torch.float32)] * 3):
            # The values of float32 in both.
            own = [x.float().to(dtype).requires_grad_() for x in inputs]
            out = on(where, op)(*own, *more)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            found.append((out.detach(), *torch.autograd.grad(out, own, grad)))
        for exact, first, *others in zip(*found, strict=True):
            # Roundings of n additions add up to about sqrt(n) 2^-24 of the largest sum: 9e-6 for the longest list.
            assert (first.double() - exact).abs().max() <= 1e-5 * exact.abs().max()
            assert all(torch.equal(first, other) for other in others)
