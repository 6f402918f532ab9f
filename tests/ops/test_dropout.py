"""attention_with_dropout: without dropout against the kernels, its draws weight by weight, and large biases."""

import math

import pytest
import torch

import gistkit
from gistkit import Plan
from gistkit.layouts import icae_encoder
from gistkit.ops import attention_with_dropout
from tests.helpers.memory import peak_bytes

HOLES = torch.tensor([[[0, 0], [0, 0]], [[0, 2], [4, 5]], [[1, 4], [0, 0]], [[0, 5], [0, 0]]], dtype=torch.int32)
PLANS = {"icae": icae_encoder(6, 3, 2).compile(), "holes": Plan.from_spans(HOLES, 5)}


def inputs(plan, dtype=torch.float64):
    queries, keys = plan.spans.shape[1], plan.num_keys
    shapes = ((2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 3))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_without_dropout_it_is_attention(name, bias):
    plan = PLANS[name]
    tensors = inputs(plan)
    key_bias = 3 * torch.randn(2, 4, plan.num_keys, dtype=torch.float64) if bias else None
    if key_bias is not None:
        key_bias[0, :, 1] = -math.inf
    ways = (gistkit.attention, lambda *x, **options: attention_with_dropout(*x, dropout=0.0, **options))
    found = []
    for way in ways:
        out = way(*tensors, plan, scale=0.7, key_bias=key_bias)
        found.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_each_weight_is_dropped_by_itself(rate):
    plan, rows = PLANS["icae"], 4000
    queries, keys, _ = inputs(plan)
    query, key = queries[:1].detach().expand(rows, -1, -1, -1), keys[:1].detach().expand(rows, -1, -1, -1)
    # With these values the output is the weights.
    value = torch.eye(plan.num_keys, dtype=torch.float64).expand(rows, 2, -1, -1)
    weights = gistkit.attention(query[:1], key[:1], value[:1], plan)
    drawn = attention_with_dropout(query, key, value, plan, dropout=rate)
    kept = drawn != 0
    torch.testing.assert_close(drawn, torch.where(kept, weights / (1 - rate), 0.0), rtol=1e-10, atol=1e-10)
    seen = (weights > 0)[0]
    share = kept[:, seen].double()
    error = math.sqrt(rate * (1 - rate) / rows)
    assert (share.mean(0) - (1 - rate)).abs().max() < 5 * error
    pairs = (share - (1 - rate)).T @ (share - (1 - rate)) / rows
    assert pairs.fill_diagonal_(0).abs().max() < 6 * rate * (1 - rate) / math.sqrt(rows)


def test_half_precision_keeps_differences_of_large_biases():
    plan = gistkit.layouts.causal(2048).compile()
    query, key, value = (torch.randn(1, 1, 2048, 8) for _ in range(3))
    slopes = torch.arange(2048.0)[None, None]
    right = gistkit.attention(query, key, value, plan, key_bias=slopes)
    half = attention_with_dropout(*(x.bfloat16() for x in (query, key, value)), plan, dropout=0.0, key_bias=slopes)
    assert (half.float() - right).abs().max() < 0.05


def test_memory_does_not_grow_with_the_spans():
    length, spans = 512, 256
    steps = torch.arange(spans, dtype=torch.int32)[:, None] * 2
    plan = Plan(torch.cat([steps, steps + 1], -1).expand(1, length, -1, -1).contiguous(), length)
    tensors = [torch.randn(1, 1, length, 8) for _ in range(3)]
    result = []
    assert peak_bytes(lambda: result.append(attention_with_dropout(*tensors, plan, dropout=0.0))) < 24 << 20
    torch.testing.assert_close(result[0], gistkit.attention(*tensors, plan))


def test_no_keys_and_errors_are_those_of_attention():
    empty = [torch.randn(1, 2, n, 4) for n in (3, 0, 0)]
    plan = Plan(torch.zeros(1, 3, 1, 2, dtype=torch.int32), 0)
    out = attention_with_dropout(*empty, plan, dropout=0.1, key_bias=torch.zeros(1, 1, 0))
    assert torch.equal(out, torch.zeros(1, 2, 3, 4))
    query, key, value = inputs(PLANS["holes"])
    for spans, error in (
        (HOLES[:1], "query's 4 rows, got one for 1"),
        (HOLES[None].repeat(3, 1, 1, 1), "for 1 or 2 sequences, got one for 3"),
    ):
        with pytest.raises(ValueError, match=error):
            attention_with_dropout(query, key, value, Plan.from_spans(spans, 5), dropout=0.1)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_out_of_range_are_named(rate):
    with pytest.raises(ValueError, match=f"dropout: expected at least 0 and below 1, got {rate}"):
        attention_with_dropout(*inputs(PLANS["icae"]), PLANS["icae"], dropout=rate)
