"""Attention over the grouped order and over the interleaved one: the same results and gradients, those of the mask."""

import pytest
import torch
from torch import Tensor

import gistkit
from gistkit import Plan, layouts
from gistkit.layouts import Layout

# Windows of memory, then what memory sees of memory, itself and BOS, and whether the context sees it.
OPTIONS = ("windows", "memory_sees_memory", "memory_sees_itself", "memory_sees_bos", "context_sees_memory")
CHOSEN = [
    (1, False, False, False, False),
    (1, True, True, True, True),
    (5, False, True, False, True),
    (5, True, False, True, False),
    (None, True, True, False, False),
    (None, False, False, True, True),
]
LAYOUTS = {str(chosen): layouts.gistpool(13, 3, 4, **dict(zip(OPTIONS, chosen, strict=True))) for chosen in CHOSEN} | {
    "gist": layouts.gist(13, 3, 4),
    "separate positions": layouts.gistpool(13, 3, 4, separate_positions=True),
    "AvgPool": layouts.avgpool(13, 3, 4),
    "full context": layouts.full_context(9, 4),
    "no context": layouts.no_context(4),
}

EPSILON = torch.finfo(torch.float32).eps


def results(layout: Layout, plan: Plan, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Rotated attention and the gradients of query, key and value, in logical order."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    query, key, value = (plan.arrange(tensor, dim=2) for tensor in inputs)
    inv_freq = 100.0 ** -torch.linspace(0, 1, query.shape[-1] // 2, dtype=torch.float32)
    query, key = gistkit.rope(query, key, plan.positions, inv_freq)
    out = plan.restore(gistkit.attention(query, key, value, plan), dim=2)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def by_mask(layout: Layout, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The same with a dense mask, where a row that sees nothing is zero."""
    query, key, value = inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    inv_freq = 100.0 ** -torch.linspace(0, 1, query.shape[-1] // 2, dtype=torch.float32)
    query, key = gistkit.rope(query, key, torch.from_numpy(layout.positions.copy()), inv_freq)
    mask = torch.from_numpy(layout.dense_mask())
    weights = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -1e30).softmax(-1) * mask.any(1)[:, None]
    return [weights @ value, *torch.autograd.grad(weights @ value, inputs, grad)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_both_orders_give_what_the_mask_says(layout: Layout, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, len(layout), 8, dtype=dtype) for heads in (4, 2, 2)]
    grad = torch.randn(2, 4, len(layout), 8, dtype=dtype)
    grouped = results(layout, layout.compile(), inputs, grad)
    interleaved = results(layout, layout.compile(grouped=False), inputs, grad)

    def dense(dtype: torch.dtype) -> list[Tensor]:
        repeated = [inputs[0], *(tensor.repeat_interleave(2, 1) for tensor in inputs[1:])]
        out, query, key, value = by_mask(layout, [tensor.to(dtype) for tensor in repeated], grad.to(dtype))
        return [out, query, *(part.unflatten(1, (2, 2)).sum(2) for part in (key, value))]

    for one, other, low, exact in zip(grouped, interleaved, dense(dtype), dense(torch.float64), strict=True):
        # Sums in another order than the dense form's may be as far off as that form itself, which differs by machine.
        bound = 1e-12 if dtype == torch.float64 else 2 * (low - exact).abs().max() + 8 * EPSILON * exact.abs().max()
        for found in (one, other):
            assert (found - exact).abs().max() <= bound
