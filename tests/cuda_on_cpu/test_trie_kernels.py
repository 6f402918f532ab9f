"""A trie's CUDA kernels against float64, with the plain torch forms of the same precision as the measure."""

from __future__ import annotations

from collections.abc import Callable

import emulation
import pytest
import torch
import trie_params
from torch import Tensor
from trie_params import (
    Trie,
    ancestor_attention,
    ancestor_attention_backward,
    bias_gelu,
    bias_gelu_backward,
    transposed,
    trie_mix,
    trie_mix_backward,
)

from gistkit.ops import reference

FLOATS = [torch.float32, torch.float64]
IN_ALL_ORDERS = [(dtype, order) for dtype in FLOATS for order in emulation.ORDERS]
in_all_orders = pytest.mark.parametrize(("dtype", "order"), IN_ALL_ORDERS, ids=str)


def assert_close(got: tuple[Tensor, ...], plain: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for mine, torch_form, exact in zip(got, plain, right, strict=True):
        if mine.numel() == 0:
            continue
        # In float64 the plain form is what it is compared with; a number alone may be right by luck.
        rounding = 1e-12 if mine.dtype == torch.float64 else torch.finfo(mine.dtype).eps
        allowed = 2 * (torch_form.double() - exact).abs().max() + rounding * exact.abs().max().clamp(min=1)
        assert mine.shape == exact.shape and (mine.double() - exact).abs().max() <= allowed


def plain_forms(
    function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output and gradients by the inputs, in their precision and in float64."""
    both = []
    for dtype in (grad.dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        both.append((out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))))
    return both[0], both[1]


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


@in_all_orders
@pytest.mark.parametrize(
    ("count", "base", "places", "heads", "columns"),
    [(1, 3, 1, 1, 1), (30, 10, 3, 12, 68), (25, 3, 4, 5, 37), (9, 2, 3, 13, 132)],
)
def test_mixtures(count: int, base: int, places: int, heads: int, columns: int, dtype: torch.dtype, order: str) -> None:
    check_mixture(Trie.random(count, base, places), heads, columns, dtype, order=order, seed=count)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mixtures_of_paths_of_several_lengths(dtype: torch.dtype) -> None:
    check_mixture(Trie.random(40, 4, 4, equal=False), 4, 12, dtype)
    root = Trie.of({()}, 5, 0)
    assert root.paths.tolist() == [[0]]
    check_mixture(root, 2, 8, dtype)


def test_mixtures_of_all_positions() -> None:
    """Every symbol has entries, and neighbours share all but the last."""
    strings = {(i // 16, i // 4 % 4, i % 4) for i in range(64)}
    check_mixture(Trie.of(strings, 4, 3), 3, 8, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_more_weights_than_fit_into_shared_memory(dtype: torch.dtype) -> None:
    check_mixture(Trie.random(5, 2, 7), 31, 4, dtype)


def shifted(x: Tensor) -> Tensor:
    """The same numbers, one element behind an aligned address."""
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def check_unaligned(compute: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> None:
    """Each input alone and the outputs off the addresses that wide accesses need."""
    expected = compute(*inputs)
    found = [compute(*inputs[:i], shifted(x), *inputs[i + 1 :]) for i, x in enumerate(inputs)]
    aligned = trie_params.unwritten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_params, "unwritten", lambda *shape, like: shifted(aligned(*shape, like=like)))
        found.append(compute(*inputs))
    for got in found:
        for mine, right in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, right)


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


def attended(trie: Trie, heads: int, dim: int, dtype: torch.dtype, queries: int | None = None) -> list[Tensor]:
    """Query, key, value and the gradient of the output, for the last so many nodes."""
    nodes = len(trie.paths)
    rows = (nodes if queries is None else queries, nodes, nodes, nodes if queries is None else queries)
    return [torch.randn(count, heads, dim, dtype=dtype) for count in rows]


def check_attention(rows: list[Tensor], ancestors: Tensor, **how: object) -> None:
    query, key, value, grad = rows
    scale = 1.7 * query.size(2) ** -0.5

    def plain_form(*x: Tensor) -> Tensor:
        return reference.ancestor_attention(*x, ancestors, scale=scale).nan_to_num()

    plain, right = plain_forms(plain_form, [query, key, value], grad)
    out, weights = ancestor_attention(query, key, value, ancestors, scale=scale, **how)
    found = ancestor_attention_backward(grad, (query, key, value), weights, ancestors, scale=scale, **how)
    assert_close((out, *found), plain, right)
    assert not weights[ancestors < 0].any()
    torch.testing.assert_close(weights.sum(1), (ancestors >= 0).any(1).to(out).unsqueeze(1).expand_as(out[..., 0]))


@in_all_orders
@pytest.mark.parametrize(
    ("count", "base", "places", "heads", "dim"),
    [(1, 3, 1, 1, 1), (20, 5, 3, 3, 20), (12, 3, 4, 2, 13), (90, 2, 7, 1, 4)],
)
def test_attention(count: int, base: int, places: int, heads: int, dim: int, dtype: torch.dtype, order: str) -> None:
    trie = Trie.random(count, base, places)
    check_attention(attended(trie, heads, dim, dtype), trie.ancestors, order=order, seed=count)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_with_more_columns_than_lanes_and_more_keys_than_lanes(dtype: torch.dtype) -> None:
    trie = Trie.random(4, 2, 3)
    check_attention(attended(trie, 2, 200, dtype), trie.ancestors)
    check_attention(attended(trie, 1, 67, dtype), trie.ancestors)
    deep = torch.arange(70, dtype=torch.int32).expand(5, 70).clone()
    deep[2, 3:60], deep[3] = -1, -1
    rows = [torch.randn(count, 2, 4, dtype=dtype) for count in (5, 70, 70, 5)]
    check_attention(rows, deep)


def test_attention_of_the_ends_alone() -> None:
    trie = Trie.random(30, 3, 4)
    rows = attended(trie, 2, 8, torch.float32, trie.ends)
    check_attention(rows, trie.ancestors[-trie.ends :].contiguous())


def test_queries_without_ancestors() -> None:
    trie = Trie.random(20, 3, 3, equal=False)
    ancestors = trie.ancestors.clone()
    ancestors[::3] = -1
    check_attention(attended(trie, 2, 8, torch.float32), ancestors)
    query, key, value, grad = attended(trie, 2, 8, torch.float32)
    nobody = torch.full_like(ancestors, -1)
    out, weights = ancestor_attention(query, key, value, nobody, scale=1)
    assert not out.any() and not weights.any()
    found = ancestor_attention_backward(grad, (query, key, value), weights, nobody, scale=1)
    assert not any(x.any() for x in found)


def test_one_ancestor_is_a_copy_of_its_value() -> None:
    query, key, value = (torch.randn(7, 2, 5) for _ in range(3))
    ancestors = torch.randperm(7)[:, None].int()
    out, weights = ancestor_attention(query, key, value, ancestors, scale=100)
    assert torch.equal(out, value[ancestors[:, 0]]) and (weights == 1).all()


def test_large_scores_do_not_overflow() -> None:
    trie = Trie.random(10, 3, 3)
    query, key, value, _ = attended(trie, 2, 8, torch.float32)
    out, weights = ancestor_attention(query, key, value, trie.ancestors, scale=1e6)
    assert out.isfinite().all() and weights.max() == 1


def test_unaligned_attention() -> None:
    ancestors = Trie.random(12, 3, 3).ancestors

    def compute(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out, weights = ancestor_attention(query, key, value, ancestors, scale=1)
        return out, *ancestor_attention_backward(grad, (query, key, value), weights, ancestors, scale=1)

    check_unaligned(compute, [torch.randn(len(ancestors), 2, 8) for _ in range(4)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_rows(dtype: torch.dtype) -> None:
    trie = Trie.random(15, 3, 3)
    query, key, value, grad = attended(trie, 2, 8, dtype)
    ancestors, how = trie.ancestors, {"scale": 0.3}
    out, weights = ancestor_attention(query, key, value, ancestors, **how)
    expected = out, *ancestor_attention_backward(grad, (query, key, value), weights, ancestors, **how)
    together = torch.cat([query, key, value], 1)
    views = [together.split(2, 1)]
    for i, x in enumerate(aligned := (query, key, value)):
        odd = torch.randn(len(x), 17, dtype=dtype)
        odd[:, :16] = x.flatten(1)
        views.append((*aligned[:i], odd[:, :16].unflatten(1, (2, 8)), *aligned[i + 1 :]))
    for rows in views:
        out, weights = ancestor_attention(*rows, ancestors, **how)
        found = ancestor_attention_backward(grad, rows, weights, ancestors, **how)
        for mine, right in zip((out, *found), expected, strict=True):
            torch.testing.assert_close(mine, right)


def test_ancestors_and_entries_that_leave_the_rows_are_cut_off() -> None:
    trie = Trie.random(10, 3, 2)
    query, key, value, grad = attended(trie, 2, 8, torch.float32)
    ancestors, without = trie.ancestors.clone(), trie.ancestors.clone()
    ancestors[2, 0], ancestors[5, 0], ancestors[6, 0] = len(key), -(1 << 30), 1 << 30
    without[2, 0] = without[5, 0] = without[6, 0] = -1
    out, weights = ancestor_attention(query, key, value, ancestors, scale=1)
    assert torch.equal(out, ancestor_attention(query, key, value, without, scale=1)[0])
    entries, offsets = transposed(ancestors, len(key))
    entries[:2] = torch.tensor([-5, 1 << 30])
    offsets[0], offsets[2], offsets[-1] = -9, 1 << 30, 1 << 30
    lists = entries, offsets
    ancestor_attention_backward(grad, (query, key, value), weights, ancestors, scale=1, lists=lists)


def check_gelu(rows: int, columns: int, dtype: torch.dtype, scaled: bool, **how: object) -> None:
    x, bias, grad = (torch.randn(shape, dtype=dtype) * 3 for shape in ((rows, columns), (columns,), (rows, columns)))
    scale = [torch.randn(rows, dtype=dtype)] if scaled else []
    plain, right = plain_forms(reference.bias_gelu, [x, bias, *scale], grad)
    found = bias_gelu_backward(grad, x, bias, *scale, **how)
    assert_close((bias_gelu(x, bias, *scale, **how), *found), plain, right)


@in_all_orders
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 12), (37, 29), (3, 264)])
def test_gelu(rows: int, columns: int, scaled: bool, dtype: torch.dtype, order: str) -> None:
    check_gelu(rows, columns, dtype, scaled, order=order, seed=rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
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


def test_the_order_of_blocks_and_threads_changes_no_bit() -> None:
    trie = Trie.random(90, 2, 7)
    weights, table, base, grad = mixture(trie, 2, 4, torch.float32)
    query, key, value, grad_attended = attended(trie, 1, 4, torch.float32)
    x, bias, scale, grad_x = torch.randn(300, 5), torch.randn(5), torch.randn(300), torch.randn(300, 5)
    runs = []
    for how in ({"order": order, "seed": 3} for order in (*emulation.ORDERS, "forward")):
        out, attention = ancestor_attention(query, key, value, trie.ancestors, scale=0.5, **how)
        rows = query, key, value
        found = [out, trie_mix(weights, table, base, trie.paths, **how), bias_gelu(x, bias, scale, **how)]
        found += trie_mix_backward(grad, weights, table, trie.paths, **how)
        found += ancestor_attention_backward(grad_attended, rows, attention, trie.ancestors, scale=0.5, **how)
        found += bias_gelu_backward(grad_x, x, bias, scale, **how)
        runs.append(found)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_long_list_is_shared_out_among_a_block() -> None:
    """The nodes of the root have more entries than a slot of lanes takes alone."""
    trie = Trie.random(90, 2, 7)
    assert transposed(trie.ancestors, len(trie.paths))[1].diff().max() > 64
    check_attention(attended(trie, 2, 6, torch.float32), trie.ancestors)


@pytest.mark.parametrize("order", emulation.ORDERS)
def test_a_block_takes_several_long_lists(order: str) -> None:
    ancestors = torch.stack([torch.randint(2 * i, 2 * i + 2, (150,)) for i in range(3)], 1).int()
    rows = [torch.randn(count, 2, 20) for count in (150, 6, 6, 150)]
    check_attention(rows, ancestors, order=order)
