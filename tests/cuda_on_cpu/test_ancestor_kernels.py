"""The CUDA kernels of attention to ancestors against float64, with the plain torch form as the measure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from trie_cases import assert_close, attended, by_dtype, check_unaligned, plain_forms
from trie_params import Trie, ancestor_attention, ancestor_attention_backward, transposed

from gistkit.ops import reference

pytestmark = pytest.mark.usefixtures("build")


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


@by_dtype
@pytest.mark.parametrize(
    ("count", "base", "places", "heads", "dim"),
    [(1, 3, 1, 1, 1), (20, 5, 3, 3, 20), (12, 3, 4, 2, 13), (90, 2, 7, 1, 4)],
)
def test_attention(count: int, base: int, places: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    trie = Trie.random(count, base, places)
    check_attention(attended(trie, heads, dim, dtype), trie.ancestors, seed=count)


@by_dtype
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


@by_dtype
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


def test_a_long_list_is_shared_out_among_a_block() -> None:
    """The nodes of the root have more entries than a slot of lanes takes alone."""
    trie = Trie.random(90, 2, 7)
    assert transposed(trie.ancestors, len(trie.paths))[1].diff().max() > 64
    check_attention(attended(trie, 2, 6, torch.float32), trie.ancestors)


def test_a_block_takes_several_long_lists() -> None:
    ancestors = torch.stack([torch.randint(2 * i, 2 * i + 2, (150,)) for i in range(3)], 1).int()
    rows = [torch.randn(count, 2, 20) for count in (150, 6, 6, 150)]
    check_attention(rows, ancestors)
