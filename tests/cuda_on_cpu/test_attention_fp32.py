"""The fp32 attention kernels on a CPU, forward and backward, against the reference in fp64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_cases import STRUCTS, Backward, Case, Forward, Rows, check
from emulation import ORDERS, Library, build
from torch import Tensor

SOURCES = ["csrc/cuda/attention_fp32.cu"]
FORWARD = ("out", "lse")
GRADIENTS = ("grad_query", "grad_key", "grad_value")


def library(checked: bool) -> Library:
    return build("attention_fp32", SOURCES, checked=checked, structs=STRUCTS)


def forward(case: Case, *, checked: bool = False, order: str = "forward") -> list[Tensor]:
    params = Forward()
    case.fill(params)
    out = case.empty(case.heads, case.queries, case.value_dim)
    lse = torch.full((case.batch, case.heads, case.queries), torch.nan)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    library(checked).run(
        "gistkit::cuda::attention_fp32_forward",
        params,
        inputs=case.inputs("query", "key", "value", "key_bias"),
        outputs={"out": out, "lse": lse},
        order=order,
    )
    return [out, lse]


def backward(case: Case, out: Tensor, lse: Tensor, *, checked: bool = False, order: str = "forward") -> list[Tensor]:
    """[grad_query, grad_key, grad_value] and with a bias its gradient."""
    params = Backward()
    case.fill(params)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    params.grad_out, params.grad_lse = Rows.of(case.tensors["grad_out"]), case.tensors["grad_lse"].data_ptr()
    grads = {
        "grad_query": case.empty(case.heads, case.queries, case.dim),
        "grad_key": case.empty(case.key_heads, case.keys, case.dim),
        "grad_value": case.empty(case.key_heads, case.keys, case.value_dim),
    }
    for name, t in grads.items():
        setattr(params, name, Rows.of(t))
    if case.bias:
        grads["grad_key_bias"] = torch.full((case.batch, case.heads, case.keys), torch.nan)
        params.grad_key_bias = grads["grad_key_bias"].data_ptr()
    kernels = library(checked)
    size = kernels.function("gistkit::cuda::attention_fp32_workspace")
    size.restype = ctypes.c_int64
    workspace = torch.full((size(ctypes.c_void_p(ctypes.addressof(params))) // 4,), torch.nan)
    kernels.run(
        "gistkit::cuda::attention_fp32_backward",
        params,
        workspace.data_ptr(),
        inputs={
            **case.inputs("query", "key", "value", "key_bias", "grad_out", "grad_lse"),
            "out": out,
            "lse": lse,
        },
        outputs={**grads, "workspace": workspace},
        order=order,
    )
    return list(grads.values())


def check_both(case: Case, **options: object) -> None:
    out, lse = forward(case, **options)
    check(case, [out, lse], FORWARD)
    grads = backward(case, out, lse, **options)
    check(case, grads, (*GRADIENTS, "grad_key_bias")[: len(grads)])


@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize("length", [1, 63, 65, 203])
def test_parity(length: int, kind: str) -> None:
    check_both(Case(length, kind=kind, batch=1, dim=24))


CASES = {
    "gqa": Case(70, 111, heads=4, key_heads=2, dim=33, value_dim=17),
    "wide": Case(37, 70, heads=1, dim=256, value_dim=130),
    "narrow": Case(40, 70, dim=1, value_dim=3),
    "cap": Case(67, 130, dim=20, softcap=3.0),
    "bias": Case(67, 130, dim=20, bias="bh"),
    "shared bias": Case(67, 130, dim=20, bias="h", softcap=2.0),
    "infinite bias": Case(67, 66, dim=20, bias="i", kind="causal"),
    "tokens": Case(50, 70, dim=20, layout="tokens"),
    "odd": Case(50, 70, dim=20, layout="odd"),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str) -> None:
    check_both(CASES[name])


@pytest.mark.parametrize("order", ORDERS)
def test_checked(order: str) -> None:
    """Every access in bounds, nothing read that was not written, no race; the same bits in each order."""
    for case in (Case(67, 70, dim=34, value_dim=9, heads=4, key_heads=2, batch=1, bias="b"), Case(33, 5, dim=130)):
        out, lse = forward(case, checked=True, order=order)
        plain = forward(case)
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
        grads = backward(case, out, lse, checked=True, order=order)
        assert all(torch.equal(a, b) for a, b in zip(grads, backward(case, out, lse), strict=True))


def test_rows_without_keys() -> None:
    """Output 0, lse -inf, no gradient, whatever comes from above."""
    case = Case(50, 40, dim=8, bias="b")
    case.plan.spans[:] = 0
    case.plan.spans[:, 1, 0] = torch.tensor([1, 2])
    case.tensors["key_bias"][..., 1] = -torch.inf
    case.tensors["grad_out"][:] = torch.nan
    out, lse = forward(case)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in backward(case, out, lse))


def test_unseen_keys_may_hold_anything() -> None:
    case = Case(50, 90, dim=8)
    case.plan.spans.clamp_(max=70)
    alone = Case(50, 90, dim=8)
    alone.plan.spans.clamp_(max=70)
    for name in ("key", "value"):
        case.tensors[name][:, :, 70:] = torch.nan
    out, lse = forward(case)
    expected = forward(alone)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for mine, other in zip(backward(case, out, lse), backward(alone, out, lse), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("queries,keys", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries: int, keys: int) -> None:
    case = Case(queries, keys, dim=8)
    out, lse = forward(case)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((t == 0).all() for t in backward(case, out, lse))
