"""What the tests of a trie's CUDA kernels have in common: float64 as the truth, plain torch forms as the measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import trie_params
from torch import Tensor
from trie_params import Trie

from tests.helpers.views import as_unaligned

FLOATS = [torch.float32, torch.float64]
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def assert_close(
    got: Sequence[Tensor], plain: Sequence[Tensor], right: Sequence[Tensor], double: float = 1e-12, least: float = 1
) -> None:
    """No error beyond twice that of the plain form, and a rounding of the largest number, or of one of `least`."""
    for mine, torch_form, exact in zip(got, plain, right, strict=True):
        if mine.numel() == 0:
            continue
        # In float64 the plain form is what it is compared with; a number alone may be right by luck.
        rounding = double if mine.dtype == torch.float64 else torch.finfo(mine.dtype).eps
        allowed = 2 * (torch_form.double() - exact).abs().max() + rounding * exact.abs().max().clamp(min=least)
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


def check_unaligned(compute: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> None:
    """Each input alone and the outputs off the addresses that wide accesses need."""
    expected = compute(*inputs)
    found = [compute(*inputs[:i], as_unaligned(x), *inputs[i + 1 :]) for i, x in enumerate(inputs)]
    aligned = trie_params.unwritten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_params, "unwritten", lambda *shape, like: as_unaligned(aligned(*shape, like=like)))
        found.append(compute(*inputs))
    for got in found:
        for mine, right in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, right)


def attended(trie: Trie, heads: int, dim: int, dtype: torch.dtype, queries: int | None = None) -> list[Tensor]:
    """Query, key, value and the gradient of the output, for the last so many nodes."""
    nodes = len(trie.paths)
    rows = (nodes if queries is None else queries, nodes, nodes, nodes if queries is None else queries)
    return [torch.randn(count, heads, dim, dtype=dtype) for count in rows]
