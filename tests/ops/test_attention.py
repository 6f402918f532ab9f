"""attention against the dense reference: values, gradients, determinism, instruction sets, decoding, merging."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gistkit
from gistkit import Plan
from gistkit.ops import reference
from tests.helpers.isas import BEYOND, ISAS
from tests.helpers.memory import peak_bytes
from tests.helpers.nonfinite import random_spans
from tests.helpers.rounding import check, plain_attention
from tests.helpers.threads import assert_same_for_any_number_of_threads

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_key_bias")


def by_isa(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Each instruction set with each dtype; those that multiply bfloat16 as it is differ in nothing else."""
    pairs = [(isa, dtype) for isa in ISAS for dtype in dtypes]
    pairs += [(isa, torch.bfloat16) for isa in BEYOND if torch.bfloat16 in dtypes]
    return pytest.mark.parametrize(("attention_isa", "dtype"), pairs, indirect=["attention_isa"], ids=str)


def causal_plan(length: int) -> Plan:
    end = torch.arange(1, length + 1, dtype=torch.int32)
    return Plan.from_spans(torch.stack([torch.zeros_like(end), end], -1)[:, None], length)


class Case:
    """Inputs, and upstream gradients for out and lse."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, bias: str = "", seed: int = 0) -> None:
        batch, heads, key_heads, queries, keys, dim, value_dim, spans, shared = shape
        g = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        make = lambda *size: torch.randn(size, generator=g, dtype=torch.float64)  # noqa: E731
        self.plan = random_spans(queries, keys, spans, g, 1 if shared else batch)
        self.inputs = [
            make(batch, heads, queries, dim).to(dtype),
            make(batch, key_heads, keys, dim).to(dtype),
            make(batch, key_heads, keys, value_dim).to(dtype),
        ]
        self.grad_out = make(batch, heads, queries, value_dim).to(dtype)
        self.grad_lse = make(batch, heads, queries).to(wide)
        if bias:
            key_bias = make(batch if "b" in bias else 1, heads if "h" in bias else 1, keys).to(wide)
            if "i" in bias:
                key_bias[..., ::5] = -torch.inf
            self.inputs.append(key_bias)

    def run(self, function: Any, dtype: torch.dtype | None = None, **options: Any) -> list[Tensor]:
        """[out, lse, gradients ...] of a function with attention's signature, in another dtype if one is given."""
        convert = lambda t: t if dtype is None else t.to(dtype)  # noqa: E731
        inputs = [convert(t.detach()).clone().requires_grad_() for t in self.inputs]
        bias = inputs[3] if len(inputs) == 4 else None
        out, lse = function(*inputs[:3], self.plan, key_bias=bias, return_lse=True, **options)
        finite = torch.where(lse == -torch.inf, 0, lse)
        total = (out * convert(self.grad_out)).sum() + (finite * convert(self.grad_lse).to(finite.dtype)).sum()
        grads = torch.autograd.grad(total, inputs)
        return [out.detach(), lse.detach(), *grads]

    def run_low(self, matrix_unit: bool = False, **options: Any) -> list[Tensor]:
        """The yardstick of the same precision: plain torch, sums in float32 where the inputs are narrower.

        A matrix unit takes its operands rounded: gradients then are measured against torch's own in half precision.
        """
        if self.inputs[0].dtype in (torch.float32, torch.float64):
            return self.run(plain_attention, **options)
        errors = self.run(reference.attention, **options)
        # The backward knows `out` as it was rounded, and a column sums that over all rows.
        first = 2 if matrix_unit else 5
        errors[first:] = self.run(plain_attention, **options)[first:]
        return errors


# fp32: lse, up to 8 here, waits for the backward rounded to fp32, an error of up to 5e-7 in a row's weights, which meet
# terms of up to twice the gradients' size. fp64 has no wider yardstick: there it is the distance of two roundings.
EPSILON = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-6, torch.float16: 1e-6}

# batch, query heads, key heads, queries, keys, Dqk, Dv, spans, one plan for the batch
SHAPES = {
    "one": (1, 1, 1, 1, 1, 1, 1, 1, False),
    "few-queries": (2, 6, 2, 3, 1031, 24, 40, 2, False),
    "few-of-three-heads": (2, 6, 2, 9, 523, 40, 24, 2, False),
    "few-of-many-heads": (2, 8, 2, 15, 1031, 40, 24, 2, False),
    "gqa-odd": (2, 4, 2, 97, 271, 33, 17, 3, False),
    "shared-plan": (3, 2, 1, 41, 67, 64, 64, 2, True),
    "tiles": (1, 2, 2, 193, 523, 16, 32, 2, False),
    "wide": (1, 1, 1, 29, 263, 256, 256, 1, False),
}


@by_isa(*DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parity(shape: tuple[int, ...], dtype: torch.dtype, attention_isa: str) -> None:
    case = Case(shape, dtype)
    exact = case.run(reference.attention, torch.float64)
    check(case.run(gistkit.attention), case.run_low(attention_isa in BEYOND), exact, EPSILON[dtype])


@by_isa(torch.float32, torch.float64, torch.bfloat16)
@pytest.mark.parametrize(
    ("shape", "bias", "softcap"),
    [
        ("few-queries", "", 3.0),
        ("few-queries", "b", None),
        ("few-queries", "bh", 3.0),
        ("few-queries", "i", None),
        ("gqa-odd", "", 3.0),
        ("gqa-odd", "h", None),
        ("gqa-odd", "bh", 3.0),
        ("gqa-odd", "i", 3.0),
    ],
)
def test_parity_with_bias_and_cap(
    shape: str, bias: str, softcap: float | None, dtype: torch.dtype, attention_isa: str
) -> None:
    case = Case(SHAPES[shape], dtype, bias=bias)
    exact = case.run(reference.attention, torch.float64, softcap=softcap)
    low = case.run_low(attention_isa in BEYOND, softcap=softcap)
    check(case.run(gistkit.attention, softcap=softcap), low, exact, EPSILON[dtype])


@by_isa(torch.float32, torch.float64, torch.bfloat16)
@pytest.mark.parametrize(("shape", "bias", "softcap"), [("few-queries", "b", 3.0), ("gqa-odd", "h", None)])
def test_a_bias_of_zeros_has_a_gradient_and_changes_nothing_to_the_bit(
    shape: str, bias: str, softcap: float | None, dtype: torch.dtype, attention_isa: str
) -> None:
    case = Case(SHAPES[shape], dtype, bias=bias)
    case.inputs[3].zero_()
    exact = case.run(reference.attention, torch.float64, softcap=softcap)
    got = case.run(gistkit.attention, softcap=softcap)
    check(got, case.run_low(attention_isa in BEYOND, softcap=softcap), exact, EPSILON[dtype])
    case.inputs.pop()
    for name, mine, plain in zip(NAMES, got[:5], case.run(gistkit.attention, softcap=softcap), strict=False):
        assert torch.equal(mine, plain), name


@by_isa(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("level", [-1e3, -65504.0, 1e6, torch.finfo(torch.float32).min, 3e38])
def test_large_biases(level: float, dtype: torch.dtype, attention_isa: str) -> None:
    """All keys far off, or a third and rows that see only such keys: the mask values and slopes that others use."""
    for shape, parts in itertools.product(("gqa-odd", "few-queries"), (3, 1)):
        case = Case(SHAPES[shape], dtype, bias="h")
        case.inputs[3][..., : case.plan.num_keys // parts] += level
        got, plain = case.run(gistkit.attention), case.run(reference.attention)
        exact = case.run(reference.attention, torch.float64)
        rounding = 1e-6 if dtype == torch.float32 else 2**-7
        for i, (name, mine, low, true) in enumerate(zip(NAMES, got, plain, exact, strict=True)):
            seen = true > -torch.inf
            assert torch.equal(mine > -torch.inf, seen)
            error, allowed = ((t.double() - true)[seen].abs().max() for t in (mine, low))
            size = 1 if i < 2 else 1 + true.abs().max()
            assert error <= 2 * allowed + rounding * size, (shape, parts, name, error, allowed)


@by_isa(torch.float32, torch.float64, torch.bfloat16)
@pytest.mark.parametrize("rows", [3, 40])
def test_one_score_above_all_others_is_the_maximum_wherever_it_stands(
    rows: int, dtype: torch.dtype, attention_isa: str
) -> None:
    """Relative to another number its weight would be infinite."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value = (torch.randn(1, 1, n, 16).to(dtype) for n in (rows, 96, 96))
    spans = torch.tensor([0, 96], dtype=torch.int32).expand(rows, 1, 2).contiguous()
    for at in range(40, 73):
        bias = torch.zeros(1, 1, 96, dtype=wide)
        bias[..., at] = 3000
        out, lse = gistkit.attention(query, key, value, Plan.from_spans(spans, 96), key_bias=bias, return_lse=True)
        assert torch.equal(out, value[:, :, at : at + 1].expand_as(out)), at
        assert ((lse - 3000).abs() < 20).all(), at


def with_gradients(function: Any, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """[out, gradients ...] of a function of query, key and value, behind which there is the gradient from above."""
    inputs = [t.to(dtype, copy=True).requires_grad_() for t in tensors[:3]]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3].to(dtype))]


def assert_near(got: list[Tensor], low: list[Tensor], exact: list[Tensor], epsilon: float = 0, what: str = "") -> None:
    """No error beyond twice torch's, and a share of what is largest."""
    for name, mine, torchs, true in zip(("out", "query", "key", "value"), got, low, exact, strict=True):
        error, allowed = (mine - true).abs().max(), 2 * (torchs - true).abs().max() + epsilon * true.abs().max()
        assert error <= allowed, f"{what} {name}: error {error:.2e}, allowed {allowed:.2e}"


@by_isa(torch.float32, torch.bfloat16)
def test_gradients_over_a_long_causal_sequence(dtype: torch.dtype, attention_isa: str) -> None:
    """Sums of many terms lose no more than torch's, and whole tiles are seen."""
    heads, key_heads, length, dim, dim_v = 4, 2, 800, 80, 48
    g = torch.Generator().manual_seed(3)
    shapes = (heads, dim), (key_heads, dim), (key_heads, dim_v), (heads, dim_v)
    tensors = [torch.randn(1, count, length, size, generator=g).to(dtype) for count, size in shapes]
    plan, sdpa = causal_plan(length), torch.nn.functional.scaled_dot_product_attention
    exact = with_gradients(lambda q, k, v: reference.attention(q, k, v, plan), tensors, torch.float64)
    low = with_gradients(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), tensors, dtype)
    got = with_gradients(lambda q, k, v: gistkit.attention(q, k, v, plan), tensors, dtype)
    assert_near(got, low, exact)


@pytest.mark.parametrize(("dim", "size"), [(64, 8.0), (100, 1.0), (256, 8.0)])
def test_gradients_of_any_number_of_rows_are_as_exact(dim: int, size: float, isa: str, one_thread: None) -> None:
    """Forward and backward must agree on large logits, whichever kernel the number of rows chooses."""
    keys = 300
    for rows in (1, 7, 16, 17, 33, 65):
        # The largest error of few scores is a matter of luck.
        g, batch = torch.Generator().manual_seed(rows), max(1, 48 // rows)
        shapes = ((rows, size), (keys, 1.0), (keys, 1.0), (rows, 1.0))
        tensors = [factor * torch.randn(batch, 2, count, dim, generator=g) for count, factor in shapes]
        spans = torch.tensor([0, keys], dtype=torch.int32).expand(rows, 1, 2).contiguous()
        plan = Plan.from_spans(spans, keys)

        def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

        exact, low = (with_gradients(dense, tensors, dtype) for dtype in (torch.float64, torch.float32))
        got = with_gradients(lambda q, k, v, plan=plan: gistkit.attention(q, k, v, plan), tensors, torch.float32)
        assert_near(got, low, exact, 1.5e-6, f"{rows} rows")


@pytest.mark.parametrize("attention_isa", BEYOND, indirect=True)
def test_weights_are_rounded_where_bfloat16_is_multiplied_alone(attention_isa: str) -> None:
    case = Case((1, 1, 1, 300, 300, 32, 32, 1, False), torch.bfloat16)
    found = []
    for name in (attention_isa, "avx512", attention_isa):
        gistkit.ops.cpu_isa(name)
        found.append(case.run(gistkit.attention))
    for name, a, b, c in zip(NAMES, *found, strict=False):
        assert torch.equal(a, c) and (name == "lse" or not torch.equal(a, b)), name


@pytest.mark.parametrize(("rows", "shared"), [(7, False), (300, False), (300, True)])
def test_rows_that_see_few_keys_of_many(rows: int, shared: bool) -> None:
    """Against sums over the gathered keys; which tiles are seen differs between sequences, and one sees none."""
    keys, batch = 20_000, 3
    g = torch.Generator().manual_seed(0)
    start = torch.randint(0, keys - 3, (1 if shared else batch, rows, 2), generator=g).sort(-1).values
    start[..., 1] = torch.maximum(start[..., 1], start[..., 0] + 3).clamp(max=keys - 3)
    start[..., 0] = torch.minimum(start[..., 0], start[..., 1] - 3)
    spans = torch.stack([start, start + 3], -1).int()
    if not shared:
        spans[1] = keys
    query, key, value = (torch.randn(batch, 2, n, 8, generator=g).requires_grad_() for n in (rows, keys, keys))
    out = gistkit.attention(query, key, value, Plan.from_spans(spans, keys))

    wide = [t.detach().double().requires_grad_() for t in (query, key, value)]
    index = (start[..., None] + torch.arange(3)).flatten(-2).expand(batch, -1, -1)
    gathered = [torch.stack([t[b][:, index[b]] for b in range(batch)]) for t in wide[1:]]
    weights = torch.einsum("bhnd,bhnkd->bhnk", wide[0], gathered[0]).mul(8**-0.5).softmax(-1)
    expected = torch.einsum("bhnk,bhnkd->bhnd", weights, gathered[1])
    if not shared:
        expected = expected * torch.tensor([1.0, 0.0, 1.0])[:, None, None, None]
    torch.testing.assert_close(out, expected.float())
    upstream = torch.randn(out.shape, generator=g)
    grads = torch.autograd.grad(out, (query, key, value), upstream)
    for got, true in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(got, true.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [8, 40])
def test_memory_follows_the_keys_that_are_seen(rows: int) -> None:
    """Nine million keys, of which a row sees three: one row of them in memory stands for all."""
    keys = 9_000_000
    start = torch.randint(0, keys - 3, (rows, 1), dtype=torch.int32)
    start[0], start[1] = 0, keys - 3
    plan = Plan.from_spans(torch.stack([start, start + 3], -1), keys)
    query, one = torch.randn(1, 4, rows, 16), torch.randn(1, 1, 1, 16).expand(1, 4, keys, 16)
    result = []
    assert peak_bytes(lambda: result.append(gistkit.attention(query, one, one, plan))) < 64 << 20
    torch.testing.assert_close(result[0], one[:, :, :rows])


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0), (200, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_queries_or_no_keys(queries: int, keys: int, dtype: torch.dtype) -> None:
    case = Case((2, 4, 2, queries, keys, 8, 8, 1, False), dtype, bias="h")
    got = case.run(gistkit.attention)
    assert got[0].shape == (2, 4, queries, 8)
    assert (got[1] == -torch.inf).all()
    for name, t in zip(NAMES, got, strict=True):
        assert name == "lse" or (t == 0).all(), name
    if not keys:
        strided = torch.empty(8, 2, 2, 0, dtype=dtype).permute(1, 2, 3, 0)
        assert torch.equal(gistkit.attention(case.inputs[0], strided, strided, case.plan), got[0])


@by_isa(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("queries", [2, 50])
def test_rows_without_keys(queries: int, dtype: torch.dtype, attention_isa: str) -> None:
    """Whatever comes from above, also where the only keys of a row have a bias of -inf."""
    q, k, v = (torch.randn(1, 1, queries, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, queries)
    bias[..., 1] = -torch.inf
    bias.requires_grad_()
    spans = torch.zeros(queries, 1, 2, dtype=torch.int32)
    spans[1] = torch.tensor([1, 2])
    out, lse = gistkit.attention(q, k, v, Plan.from_spans(spans, queries), key_bias=bias, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    grads = torch.autograd.grad([out, lse], [q, k, v, bias], [torch.full_like(out, torch.nan), torch.ones_like(lse)])
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(dtype: torch.dtype) -> None:
    """Views of [B, N, H, D] and of one fused projection, misaligned, expanded, with a strided last dimension."""
    g = torch.Generator().manual_seed(1)
    plan = causal_plan(70)
    fused = torch.randn(2, 70, 3 * 4 * 24 + 1, generator=g).to(dtype)[..., 1:].view(2, 70, 3, 4, 24)
    views = {
        "fused": [fused[:, :, i].transpose(1, 2) for i in range(3)],
        "tokens first": [torch.randn(2, 70, 4, 24, generator=g).to(dtype).transpose(1, 2) for _ in range(3)],
        "expanded": [torch.randn(2, 1, 70, 24, generator=g).to(dtype).expand(2, 4, 70, 24) for _ in range(3)],
        "strided": [torch.randn(2, 4, 24, 70, generator=g).to(dtype).transpose(2, 3) for _ in range(3)],
    }
    for name, tensors in views.items():
        inputs = [t.detach().requires_grad_() for t in tensors]
        copies = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in tensors]
        got, plain = gistkit.attention(*inputs, plan), gistkit.attention(*copies, plan)
        assert torch.equal(got, plain), name
        upstream = torch.randn(got.shape, generator=g).to(dtype)
        for a, b in zip(
            torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(plain, copies, upstream), strict=True
        ):
            assert torch.equal(a, b), name
    assert got.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(1, 2, 1, 300, 900, 32, 48, 2, False), (1, 2, 1, 4, 3000, 32, 48, 2, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(shape, dtype, bias="h")
    case.inputs[3] += 1e4  # lse is summed again
    assert_same_for_any_number_of_threads(lambda: case.run(gistkit.attention))


def test_gradcheck() -> None:
    for shape, softcap in (((1, 2, 1, 3, 5, 3, 2, 2, False), 2.0), ((2, 2, 2, 19, 7, 2, 3, 1, True), None)):
        case = Case(shape, torch.float64, bias="h")
        inputs = [t.requires_grad_() for t in case.inputs]

        def function(q: Tensor, k: Tensor, v: Tensor, b: Tensor, case: Case = case, cap: Any = softcap) -> Any:
            out, lse = gistkit.attention(q, k, v, case.plan, key_bias=b, softcap=cap, scale=0.7, return_lse=True)
            return out, torch.where(lse == -torch.inf, 0, lse)

        assert torch.autograd.gradcheck(function, inputs, atol=1e-8, rtol=1e-6)


@by_isa(torch.float32, torch.float64, torch.bfloat16)
@pytest.mark.parametrize("queries", [3, 19])
def test_keys_that_no_row_sees_are_not_read(attention_isa: str, queries: int, dtype: torch.dtype) -> None:
    # A row's second span is empty, and the last tile of keys reaches beyond the keys. A cache's unused end is anything.
    spans = torch.zeros(1, queries, 2, 2, dtype=torch.int32)
    spans[0, :8, 0, 1] = torch.arange(1, min(queries, 8) + 1)
    query, key, value = (torch.randn(1, 2, n, 12, dtype=dtype) for n in (queries, 19, 19))
    plan = Plan.from_spans(spans, 19)
    expected = reference.attention(query, key, value, plan)
    key[:, :, 8:], value[:, :, 8:] = torch.nan, torch.nan
    # Keys at once, so that what is packed and never read holds NaN.
    gistkit.attention(*(torch.full((1, 4, 64, 64), torch.nan, dtype=dtype) for _ in range(3)), causal_plan(64))
    tensors = [t.clone().requires_grad_() for t in (query, key, value)]
    ours = gistkit.attention(*tensors, plan)
    # Weights of up to 1 rounded to 8 bits, and values of up to 3.
    rounded = {"rtol": 0.016, "atol": 3 * 2**-9} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours, expected, **rounded)
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(ours.sum(), tensors))


def test_split_keys_merge_to_the_whole() -> None:
    case = Case((2, 4, 2, 37, 230, 16, 24, 3, False), torch.float64)
    whole, whole_lse = gistkit.attention(*case.inputs[:3], case.plan, return_lse=True)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = None, None
        for begin, end in ((0, 60), (60, 60), (60, 230)):
            part = (case.plan.spans.clamp(begin, end) - begin).contiguous()
            other = gistkit.attention(
                q, k[:, :, begin:end], v[:, :, begin:end], Plan(part, end - begin), return_lse=True
            )
            out, lse = other if out is None else gistkit.merge_attention(out, lse, *other)
        return out, lse

    out, lse = merged(*case.inputs[:3])
    torch.testing.assert_close(out, whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, whole_lse, atol=1e-12, rtol=1e-12)
    wanted = case.run(gistkit.attention)

    def as_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, **_: Any) -> tuple[Tensor, Tensor]:
        return merged(q, k, v)

    for a, b in zip(case.run(as_attention), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_scale_and_cap_follow_the_formula() -> None:
    """Against numbers worked out by hand, not by the reference."""
    q, k = torch.tensor([[[[2.0]]]]), torch.tensor([[[[1.0], [3.0]]]])
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    spans = torch.tensor([[[0, 2]]], dtype=torch.int32)
    bias = torch.tensor([[[0.5, 0.0]]])
    out, lse = gistkit.attention(
        q, k, v, Plan.from_spans(spans, 2), scale=0.5, softcap=2.0, key_bias=bias, return_lse=True
    )
    a, b = 2 * math.tanh(0.5) + 0.5, 2 * math.tanh(1.5)
    total = math.exp(a) + math.exp(b)
    torch.testing.assert_close(out.flatten(), torch.tensor([math.exp(a) / total, math.exp(b) / total]))
    torch.testing.assert_close(lse.item(), math.log(total), atol=1e-6, rtol=1e-6)
