"""Half precision: sums in float32, and one rounding of the result, to the nearest and of two as near to the even."""

import pytest
import torch

import gistkit
from gistkit import Plan
from tests.ops.test_attention import by_isa

HALVES = (torch.bfloat16, torch.float16)


def whole(dtype, *shape):
    """Numbers whose sums are exact in float32, half of them odd in their last place."""
    most = 2**8 if dtype == torch.bfloat16 else 2**11
    return torch.randint(-most, most, shape).to(dtype)


@by_isa(*HALVES)
@pytest.mark.parametrize("rows", [3, 70])
def test_attention_of_equal_weights_is_the_rounded_mean(rows, dtype, attention_isa):
    value = whole(dtype, 1, 2, 64, 43)
    query, key = torch.zeros(1, 2, rows, 8, dtype=dtype), torch.randn(1, 2, 64, 8).to(dtype)
    spans = torch.tensor([0, 64], dtype=torch.int32).expand(rows, 1, 2).contiguous()
    out = gistkit.attention(query, key, value, Plan.from_spans(spans, 64))
    assert torch.equal(out, value.float().mean(2, keepdim=True).to(dtype).expand_as(out))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_pooled_and_scaled_rows_are_rounded_once(dtype, isa):
    x = whole(dtype, 2, 3, 12, 43)
    pooled = gistkit.window_pool(x, windows=2)
    assert torch.equal(pooled, x.float().unflatten(2, (6, 2)).mean(3).to(dtype))
    for interleaved in (False, True):
        turned, _ = gistkit.rope(x, x, torch.zeros(12), torch.ones(21), scaling=1 + 2**-5, interleaved=interleaved)
        assert torch.equal(turned[..., :42], (x[..., :42].float() * (1 + 2**-5)).to(dtype))
