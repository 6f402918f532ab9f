"""attention as an op: opcheck, torch.compile, error messages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import gistkit
import gistkit.ops
from gistkit import Plan
from tests.ops.test_attention import causal_plan


def inputs(length: int = 9, heads: int = 4, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    """query, key and value as views of [B, N, H, D], two query heads for each key head."""
    shapes = ((2, length, heads, 8), (2, length, heads // 2, 8), (2, length, heads // 2, 6))
    return [torch.randn(s, dtype=dtype).transpose(1, 2).detach().requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float64, True), pytest.param(torch.bfloat16, False, marks=pytest.mark.slow)]
)
def test_opcheck(dtype: torch.dtype, bias: bool) -> None:
    q, k, v = inputs(dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    key_bias = torch.randn(1, 4, 9, dtype=wide, requires_grad=True) if bias else None
    args = (q, k, v, causal_plan(9).spans, key_bias, 0.3, 2.0 if bias else 0.0)
    torch.library.opcheck(torch.ops.gistkit.attention.default, args)
    out, lse = torch.ops.gistkit.attention(*args)
    detached = [t.detach() if isinstance(t, Tensor) else t for t in args]
    upstream = (torch.randn(out.shape, dtype=dtype), torch.randn_like(lse))
    backward = (*upstream, *detached[:3], out.detach(), lse.detach(), *detached[3:], bias)
    torch.library.opcheck(torch.ops.gistkit.attention_backward.default, backward)


def test_compiles_whole_and_once() -> None:
    """One graph for all lengths, with the plan as an argument, forward and backward."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(q: Tensor, k: Tensor, v: Tensor, plan: Plan, bias: Tensor) -> Tensor:
        out, lse = gistkit.attention(q, k, v, plan, key_bias=bias, return_lse=True)
        return out.transpose(1, 2).flatten(2).sum() + lse.sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9, 17, 33):
        tensors = [*inputs(length), torch.randn(1, 1, length, requires_grad=True)]
        plan = causal_plan(length)
        got = compiled(*tensors[:3], plan, tensors[3])
        expected = layer(*tensors[:3], plan, tensors[3])
        torch.testing.assert_close(got, expected)
        for a, b in zip(torch.autograd.grad(got, tensors), torch.autograd.grad(expected, tensors), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_compiles_whole_when_the_scale_changes() -> None:
    # From the second value on a float is a symbol, as a model's scaling is when another model was compiled before.
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    compiled = torch.compile(gistkit.attention, fullgraph=True, backend="aot_eager")
    for scale, softcap in ((0.3, 5.0), (0.4, 6.0), (0.5, 7.0)):
        expected = gistkit.attention(q, k, v, PLAN, scale=scale, softcap=softcap)
        torch.testing.assert_close(compiled(q, k, v, PLAN, scale=scale, softcap=softcap), expected)


@pytest.mark.slow
def test_compiles_with_inductor_and_a_closed_over_plan() -> None:
    torch._dynamo.reset()
    plan = causal_plan(9)
    q, k, v = inputs()
    compiled = torch.compile(lambda q, k, v: gistkit.attention(q * 2, k, v, plan).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), gistkit.attention(q * 2, k, v, plan).relu())


def test_grad_layouts_follow_the_inputs() -> None:
    tokens_first = inputs()
    grads = torch.autograd.grad(gistkit.attention(*tokens_first, causal_plan(9)).sum(), tokens_first)
    assert [g.stride() for g in grads] == [t.stride() for t in tokens_first]
    heads_first = [t.detach().contiguous().requires_grad_() for t in tokens_first]
    grads = torch.autograd.grad(gistkit.attention(*heads_first, causal_plan(9)).sum(), heads_first)
    assert all(g.is_contiguous() for g in grads)


Q, K, V = inputs(grad=False)
PLAN = causal_plan(9)
MISTAKES: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "rank": ((Q[0], K, V, PLAN), {}, ValueError, r"query: expected 4 dimensions.*got shape \(4, 9, 8\)"),
    "dtype": ((Q.int(), K.int(), V.int(), PLAN), {}, TypeError, "query: expected dtype torch.float32.*got torch.int32"),
    "mixed": ((Q, K.half(), V, PLAN), {}, TypeError, "key: expected query's dtype torch.float32, got torch.float16"),
    "batch": ((Q, K[:1], V, PLAN), {}, ValueError, "key: expected query's batch size 2, got 1"),
    "key dim": ((Q, K[..., :4], V, PLAN), {}, ValueError, "key: expected query's head dim 8, got 4"),
    "value length": ((Q, K, V[:, :, :5], PLAN), {}, ValueError, r"value: expected.*\(2, 9\), got \(2, 5\)"),
    "value heads": ((Q, K, V[:, :1], PLAN), {}, ValueError, r"value: expected.*\(2, 9\), got \(1, 9\)"),
    "heads": ((Q[:, :3], K, V, PLAN), {}, ValueError, "query: expected a multiple of key's 2 heads, got 3"),
    "no heads": ((Q[:, :0], K, V, PLAN), {}, ValueError, "query: expected a multiple of key's 2 heads, got 0"),
    "wide": ((Q, K, V.repeat(1, 1, 1, 50), PLAN), {}, ValueError, "value: expected a head dim from 1 to 256, got 300"),
    "no dims": ((Q[..., :0], K[..., :0], V, PLAN), {}, ValueError, "query: expected a head dim from 1 to 256, got 0"),
    "narrow": ((Q, K, V[..., :0], PLAN), {}, ValueError, "value: expected a head dim from 1 to 256, got 0"),
    "device": ((Q, K.to("meta"), V, PLAN), {}, ValueError, "key: expected query's device cpu, got meta"),
    "no plan": ((Q, K, V, PLAN.spans), {}, TypeError, "plan: expected a gistkit.Plan, got Tensor"),
    "queries": ((Q, K, V, Plan(PLAN.spans[:, :4], 9)), {}, ValueError, "one for query's 9 rows, got.* 4"),
    "keys": ((Q, K, V, Plan(PLAN.spans, 8)), {}, ValueError, "plan: expected one for key's 9 rows, got one for 8"),
    "plan batch": ((Q, K, V, Plan(PLAN.spans.repeat(3, 1, 1, 1), 9)), {}, ValueError, "for 1 or 2 sequences, got.* 3"),
    "spans of one dimension": ((Q, K, V, Plan(PLAN.spans.flatten(), 9)), {}, ValueError, r"spans: expected.*\(18,\)"),
    "spans": ((Q, K, V, Plan(PLAN.spans.long(), 9)), {}, ValueError, "plan.spans: expected.*int32.*got torch.int64"),
    **{
        f"{name} {value}": ((Q, K, V, PLAN), {name: value}, ValueError, f"{name}: expected .*{re.escape(str(value))}")
        for name, values in {"softcap": (0.0, 1e39, 3e38, 1e-45), "scale": (float("nan"), 1e300)}.items()
        for value in values
    },
    "bias shape": (
        (Q, K, V, PLAN),
        {"key_bias": torch.zeros(2, 3, 9)},
        ValueError,
        r"key_bias: expected shape \[2 or 1, 4 or 1, 9\], got \(2, 3, 9\)",
    ),
    "no bias": ((Q, K, V, PLAN), {"key_bias": 3.0}, TypeError, "key_bias: expected a torch tensor or None, got float"),
    "bias dtype": (
        (Q, K, V, PLAN),
        {"key_bias": torch.zeros(1, 1, 9, dtype=torch.float64)},
        TypeError,
        "key_bias: expected dtype torch.float32 for torch.float32 inputs, got torch.float64",
    ),
}


@pytest.mark.parametrize(("args", "options", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(args: tuple[Any, ...], options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gistkit.attention(*args, **options)


def test_merge_names_its_mistakes() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"lse_b: expected.*\(2, 3\), got \(2, 4\)"):
        gistkit.merge_attention(out, lse, out, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"out_b: expected.*\(2, 3, 4\), got \(2, 3, 5\)"):
        gistkit.merge_attention(out, lse, torch.zeros(2, 3, 5), lse)


def test_the_op_itself_checks_what_memory_safety_needs() -> None:
    spans = PLAN.spans
    for args in (
        (Q, K[:, :, :4], V, spans),
        (Q, K, V, spans[:, :5].contiguous()),
        (Q, K, V, spans.long()),
        (Q, K[..., ::2], V, spans),
        (Q, K.transpose(2, 3), V, spans),
        (Q[:, :3], K, V, spans),
        (Q, K.half(), V, spans),
    ):
        with pytest.raises(RuntimeError, match="attention: "):
            torch.ops.gistkit.attention(*args, None, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="attention: key_bias"):
        torch.ops.gistkit.attention(Q, K, V, spans, torch.zeros(1, 1, 8), 1.0, 0.0)
    out, lse = torch.ops.gistkit.attention(Q, K, V, spans, None, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="attention: lse"):
        torch.ops.gistkit.attention_backward(
            out, lse[..., :4], Q, K, V, out, lse[..., :4], spans, None, 1.0, 0.0, False
        )
