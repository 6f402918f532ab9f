"""CUDA kernels of mixtures along paths and of gelu against float64, with the plain torch forms as the measure."""

from __future__ import annotations

import emulation
import pytest
import torch
from torch import Tensor
from trie_cases import assert_close, attended, by_dtype, check_unaligned, plain_forms
from trie_params import (
    PART_ENTRIES,
    Trie,
    ancestor_attention,
    ancestor_attention_backward,
    bias_gelu,
    bias_gelu_backward,
    linked,
    transposed,
    trie_mix,
    trie_mix_backward,
)

from gistkit.ops import reference

pytestmark = pytest.mark.usefixtures("build")


def mixture(trie: Trie, heads: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Weights, table, base and the gradient of the output."""
    nodes, depth = trie.paths.shape
    shapes = ((nodes, depth, heads), (trie.symbols, heads, columns), (trie.symbols, columns), (nodes, columns))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def check_mixture(trie: Trie, heads: int, columns: int, dtype: torch.dtype, **how: object) -> None:
    weights, table, base, grad = mixture(trie, heads, columns, dtype)
    plain, right = plain_forms(lambda *x: reference.trie_mix(*x, trie.paths), [weights, table, base], grad)
    out = trie_mix(weights, table, base, trie.paths, **how)
    assert_close((out, *trie_mix_backward(grad, weights, table, trie.paths, **how)), plain, right)


@by_dtype
@pytest.mark.parametrize(
    ("count", "base", "places", "heads", "columns"),
    [(1, 3, 1, 1, 1), (30, 10, 3, 12, 68), (25, 3, 4, 5, 37), (9, 2, 3, 13, 132)],
)
def test_mixtures(count: int, base: int, places: int, heads: int, columns: int, dtype: torch.dtype) -> None:
    check_mixture(Trie.random(count, base, places), heads, columns, dtype, seed=count)


@by_dtype
def test_mixtures_of_paths_of_several_lengths(dtype: torch.dtype) -> None:
    check_mixture(Trie.random(40, 4, 4, equal=False), 4, 12, dtype)
    root = Trie.of({()}, 5, 0)
    assert root.paths.tolist() == [[0]]
    check_mixture(root, 2, 8, dtype)


def test_mixtures_of_all_positions() -> None:
    """Every symbol has entries, and neighbours share all but the last."""
    strings = {(i // 16, i // 4 % 4, i % 4) for i in range(64)}
    check_mixture(Trie.of(strings, 4, 3), 3, 8, torch.float32)


@by_dtype
def test_more_weights_than_fit_into_shared_memory(dtype: torch.dtype) -> None:
    check_mixture(Trie.random(5, 2, 7), 31, 4, dtype)


# Around the lengths at which lists are cut, and lists that begin at all kinds of places.
PART = PART_ENTRIES
CUT = [(PART - 1, PART, PART + 1), (PART, PART, PART + 1), (PART + 1,), (0, 2 * PART - 1, 0, 0, 2 * PART + 1, 1)]
CUT += [(3, 4 * PART + 1, 2 * PART, 5), (PART + 1, 1, PART + 1, PART - 3, PART + 2), (PART - 1, 1)]


@pytest.mark.parametrize("lengths", CUT, ids=str)
@by_dtype
def test_lists_cut_into_parts(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    check_mixture(Trie(len(lengths), linked(lengths, 2), torch.empty(0), 0), 2, 4, dtype)


def test_cut_lists_of_more_heads_and_columns_than_a_block_takes() -> None:
    lengths = (900, 2200, 1500)
    check_mixture(Trie(3, linked(lengths, 3), torch.empty(0), 0), 13, 37, torch.float32)


def test_unaligned_mixtures() -> None:
    trie = Trie.random(12, 3, 3)

    def compute(weights: Tensor, table: Tensor, base: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = trie_mix(weights, table, base, trie.paths)
        return out, *trie_mix_backward(grad, weights, table, trie.paths)

    check_unaligned(compute, mixture(trie, 4, 8, torch.float32))


def test_numbers_beyond_a_path_are_not_looked_at() -> None:
    trie = Trie.random(20, 3, 3, equal=False)
    weights, table, base, grad = mixture(trie, 2, 8, torch.float32)
    expected = trie_mix(weights, table, base, trie.paths), *trie_mix_backward(grad, weights, table, trie.paths)
    weights[trie.paths < 0] = float("nan")
    got = trie_mix(weights, table, base, trie.paths), *trie_mix_backward(grad, weights, table, trie.paths)
    assert all(torch.equal(mine, right) for mine, right in zip(got, expected, strict=True))


def test_an_infinite_row_reaches_its_own_nodes_only() -> None:
    trie = Trie.random(30, 4, 3)
    weights, table, base, grad = mixture(trie, 2, 8, torch.float32)
    table[5], grad[7] = float("inf"), float("nan")
    touched = (trie.paths == 5).any(1)
    assert 0 < touched.sum() < len(touched)
    assert torch.equal(trie_mix(weights, table, base, trie.paths).isfinite().all(1), ~touched)
    _, by_table, by_base = trie_mix_backward(grad, weights, table, trie.paths)
    on_path = torch.isin(torch.arange(trie.symbols), trie.paths[7])
    assert torch.equal(by_table.isfinite().all((1, 2)), ~on_path)
    assert by_base.isfinite().all(1).sum() == trie.symbols - 1


def test_symbols_and_entries_that_leave_the_table_are_cut_off() -> None:
    trie = Trie.random(10, 3, 2)
    weights, table, base, grad = mixture(trie, 2, 8, torch.float32)
    paths = trie.paths.clone()
    paths[3, 0], paths[4] = 1 << 30, torch.tensor([-(1 << 30), trie.symbols, trie.symbols])
    kept = torch.where((paths < 0) | (paths >= trie.symbols), -1, paths)
    kept[3, 0] = trie.paths[3, 0]
    out = trie_mix(weights, table, base, paths)
    assert not out[4].any()
    others = torch.arange(len(paths)) > 4
    assert torch.equal(out[others], trie_mix(weights, table, base, trie.paths)[others])
    entries, offsets = transposed(trie.paths, trie.symbols)
    entries[:2] = torch.tensor([-5, 1 << 30])
    offsets[0], offsets[2], offsets[-1] = -9, 1 << 30, 1 << 30
    by_weights, *_ = trie_mix_backward(grad, weights, table, paths, lists=(entries, offsets))
    assert not by_weights[4].any()


def test_offsets_of_cut_lists_that_leave_the_entries_are_cut_off() -> None:
    paths = linked((1500, 1200, 900), 2)
    weights, table, _, grad = mixture(Trie(3, paths, torch.empty(0), 0), 2, 4, torch.float32)
    entries, offsets = transposed(paths, 3)
    for wrong in ([-9, 1 << 30, 0, 1 << 30], [3600, 2400, 1200, 0], [1 << 30] * 4, [0, 3600, 3600, -1]):
        lists = entries, torch.tensor(wrong, dtype=torch.int32)
        trie_mix_backward(grad, weights, table, paths, lists=lists)
    right = trie_mix_backward(grad, weights, table, paths, lists=(entries, offsets))
    less = trie_mix_backward(grad, weights, table, paths, lists=(entries, offsets - torch.tensor([0, 1, 0, 0]).int()))
    assert torch.equal(right[1][2], less[1][2])
    assert not torch.equal(right[1][0], less[1][0]) and not torch.equal(right[1][1], less[1][1])


def test_one_node_in_a_large_table() -> None:
    """A symbol without entries has gradient 0."""
    weights, table, base, grad = torch.randn(1, 1, 3), torch.randn(7, 3, 5), torch.randn(7, 5), torch.randn(1, 5)
    paths = torch.tensor([[4]], dtype=torch.int32)
    torch.testing.assert_close(trie_mix(weights, table, base, paths)[0], base[4] + weights[0, 0] @ table[4])
    _, by_table, by_base = trie_mix_backward(grad, weights, table, paths)
    assert torch.equal(by_base[4], grad[0])
    assert not by_table[torch.arange(7) != 4].any() and not by_base[torch.arange(7) != 4].any()
    weights, grad, paths = weights[:0], grad[:0], paths[:0]
    assert trie_mix(weights, table, base, paths).shape == (0, 5)
    assert not any(x.any() for x in trie_mix_backward(grad, weights, table, paths))


def check_gelu(rows: int, columns: int, dtype: torch.dtype, scaled: bool, **how: object) -> None:
    x, bias, grad = (torch.randn(shape, dtype=dtype) * 3 for shape in ((rows, columns), (columns,), (rows, columns)))
    scale = [torch.randn(rows, dtype=dtype)] if scaled else []
    plain, right = plain_forms(reference.bias_gelu, [x, bias, *scale], grad)
    found = bias_gelu_backward(grad, x, bias, *scale, **how)
    assert_close((bias_gelu(x, bias, *scale, **how), *found), plain, right)


@by_dtype
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 12), (37, 29), (3, 264)])
def test_gelu(rows: int, columns: int, scaled: bool, dtype: torch.dtype) -> None:
    check_gelu(rows, columns, dtype, scaled, seed=rows)


@by_dtype
def test_gelu_of_many_rows_and_columns(dtype: torch.dtype) -> None:
    check_gelu(600, 3, dtype, True)
    check_gelu(9, 1160, dtype, True)


def test_unaligned_gelu() -> None:
    def compute(x: Tensor, bias: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return bias_gelu(x, bias, scale), *bias_gelu_backward(grad, x, bias, scale)

    check_unaligned(compute, [torch.randn(9, 8), torch.randn(8), torch.randn(9, 8), torch.randn(9)])


def test_gelu_far_out() -> None:
    x = torch.tensor([[-1e12, -200.0, -20.0, -9.0, 0.0, 9.0, 20.0, 200.0, 1e12]])
    zero, one = torch.zeros(9), torch.ones(1, 9)
    out, (slope, by_bias) = bias_gelu(x, zero), bias_gelu_backward(one, x, zero)
    torch.testing.assert_close(out, x.clamp(min=0), rtol=0, atol=1e-17)
    torch.testing.assert_close(slope, torch.where(x == 0, 0.5, (x > 0).float()))
    assert torch.equal(by_bias, slope[0])


def test_no_rows() -> None:
    x, bias = torch.randn(0, 6), torch.randn(6)
    assert bias_gelu(x, bias).shape == x.shape
    _, by_bias = bias_gelu_backward(x, x, bias)
    assert not by_bias.any()


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_the_order_of_blocks_and_threads_changes_no_bit() -> None:
    trie = Trie.random(90, 2, 7)
    weights, table, base, grad = mixture(trie, 2, 4, torch.float32)
    query, key, value, grad_attended = attended(trie, 1, 4, torch.float32)
    cut = linked((1500, 700, 2100), 3)
    cut_rows = mixture(Trie(3, cut, torch.empty(0), 0), 2, 4, torch.float32)
    x, bias, scale, grad_x = torch.randn(300, 5), torch.randn(5), torch.randn(300), torch.randn(300, 5)
    runs = []
    for how in ({"order": order, "seed": 3} for order in (*emulation.ORDERS, "forward")):
        out, attention = ancestor_attention(query, key, value, trie.ancestors, scale=0.5, **how)
        rows = query, key, value
        found = [out, trie_mix(weights, table, base, trie.paths, **how), bias_gelu(x, bias, scale, **how)]
        found += trie_mix_backward(grad, weights, table, trie.paths, **how)
        found += trie_mix_backward(cut_rows[3], *cut_rows[:2], cut, **how)
        found += ancestor_attention_backward(grad_attended, rows, attention, trie.ancestors, scale=0.5, **how)
        found += bias_gelu_backward(grad_x, x, bias, scale, **how)
        runs.append(found)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
