"""Attention's gradients by wgmma on a CPU: the contracts of test_attention_backward.py where this path serves."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import emulation
import pytest
import test_attention_backward as kernels
import test_attention_pairwise as pairwise
import torch
from attention_cases import Backward, Case, Device, Rows, check
from emulation import ORDERS, SHARED_LIMIT, statistics
from torch import Tensor

from tests.helpers import nonfinite

pytestmark = pytest.mark.usefixtures("build")

HOPPER = 90
BF16 = {"dtype": torch.bfloat16}


def backward(case: Case, **options: object) -> list[Tensor]:
    """Of a device with wgmma, and by it."""
    statistics()
    grads = kernels.backward(case, capability=HOPPER, **options)
    found = statistics()
    assert found.products and not found.matrix_loads
    return grads


def check_case(case: Case, **options: object) -> None:
    grads = backward(case, **options)
    check(case, grads, kernels.GRADIENTS[: len(grads)])


@pytest.mark.parametrize("kind", ["full", "causal", "gistpool", "dodo", "random"])
@pytest.mark.parametrize(
    "length,dim",
    [
        (200, 64),
        (203, 128),
        *(pytest.param(*size, marks=pytest.mark.nightly) for size in ((128, 64), (300, 64), (300, 128))),
    ],
)
def test_parity(length: int, dim: int, kind: str) -> None:
    check_case(Case(length, kind=kind, batch=1, heads=1, dim=dim, **BF16))


CASES = {
    "float16": Case(130, 150, dim=64, dtype=torch.float16),
    "float16, 128": Case(130, 150, heads=1, dim=128, batch=1, dtype=torch.float16),
    "gqa": Case(140, 131, heads=4, key_heads=2, dim=64, **BF16),
    "mqa": Case(140, 260, heads=3, key_heads=1, batch=1, dim=128, **BF16),
    "no lists shared": Case(200, 140, batch=3, heads=1, dim=40, **BF16),
    "8": Case(200, 140, batch=1, heads=1, dim=8, **BF16),
    "72": Case(150, 130, heads=1, dim=72, batch=1, **BF16),
    "40-24": Case(130, 190, dim=40, value_dim=24, **BF16),
    "48-128": Case(130, 190, heads=1, dim=48, value_dim=128, **BF16),
    "bias": Case(130, 140, dim=64, bias="bh", **BF16),
    "bias of groups": Case(130, 140, dim=128, heads=4, key_heads=2, bias="h", **BF16),
    "shared bias": Case(130, 140, dim=64, bias="b", dtype=torch.float16),
    "infinite bias": Case(130, 131, dim=64, bias="i", kind="causal", **BF16),
    "tokens": Case(130, 190, dim=64, layout="tokens", **BF16),
    "many tiles": Case(400, 700, dim=64, heads=1, batch=1, **BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["gqa", "no lists shared", "72", "many tiles"])
def test_sums_in_any_order(name: str) -> None:
    check_case(CASES[name], deterministic=False)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["mqa", "many tiles", "bias of groups"])
def test_same_bits_in_any_order_of_threads(name: str) -> None:
    first = backward(CASES[name])
    for order in ORDERS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, backward(CASES[name], order=order), strict=True))


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("names", [("query",), ("key", "value"), ("grad_out",)])
def test_what_is_not_finite_reaches_only_what_sees_it(names: tuple[str, ...]) -> None:
    case = Case(130, 140, heads=2, batch=1, dim=64, kind="random", **BF16)
    pairwise.spoil(case, names, seed=len(names))
    expected = pairwise.expected(case)
    out = case.empty(case.heads, case.queries, case.value_dim).copy_(expected[0])
    found = backward(case, results=(out, expected[1].float()))
    nonfinite.check([out, expected[1], *found], expected, case.dtype, "")


def test_spans_of_any_values_read_nothing_else() -> None:
    """Lists come with spans that are in order. If these are not, what is read and written stays within its bounds."""
    case = Case(200, 290, batch=2, dim=16, bias="bh", **BF16)
    lists = kernels.lists_of(case)
    g = torch.Generator().manual_seed(0)
    case.plan.spans[:] = torch.randint(-(2**31), 2**31 - 1, case.plan.spans.shape, generator=g)
    near = torch.rand(case.plan.spans.shape, generator=g) < 0.7
    case.plan.spans[near] = torch.randint(-300, 600, case.plan.spans.shape, generator=g, dtype=torch.int32)[near]
    results = torch.zeros(2, 2, 200, 16, dtype=case.dtype), torch.zeros(2, 2, 200)
    backward(case, lists=lists, results=results)


@pytest.mark.nightly
@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["gqa", "mqa", "float16, 128", "many tiles"])
def test_sums_that_start_from_what_is_subtracted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that is not the default, in both orders of sums."""
    monkeypatch.setenv("GISTKIT_HOPPER", "started")
    for deterministic in (True, False):
        check_case(CASES[name], deterministic=deterministic, defines=("GISTKIT_TRIALS",))


# What wgmma's kernels take, and what differs from it by one property.
TAKEN = Case(128, 128, batch=2, heads=4, key_heads=2, dim=64, **BF16)
LEFT = {
    "no such instructions": {"capability": 80},
    "a later device": {"capability": 100},
    "less shared memory": {"shared_limit": 163 * 1024},
    "few queries": {"queries": 127},
    "few keys": {"keys": 127},
    "float32": {"dtype": torch.float32},
    "softcap": {"softcap": 3.0},
    "wide heads": {"dim": 136},
    "wide values": {"value_dim": 136},
    "odd heads": {"dim": 60},
    "odd values": {"value_dim": 60},
    "rows that are not aligned": {"layout": "odd"},
}


def path(case: Case, *, capability: int = HOPPER, shared_limit: int = SHARED_LIMIT, scale: float | None = None) -> int:
    params, device = Backward(), Device(shared_limit=shared_limit)
    case.fill(params)
    if scale is not None:
        params.scale = scale
    rows = {"out": (case.heads, case.queries, case.value_dim), "grad_query": (case.heads, case.queries, case.dim)}
    rows |= {
        "grad_key": (case.key_heads, case.keys, case.dim),
        "grad_value": (case.key_heads, case.keys, case.value_dim),
    }
    tensors = {name: case.empty(*shape) for name, shape in rows.items()} | {"grad_out": case.tensors["grad_out"]}
    for name, t in tensors.items():
        setattr(params, name, Rows.of(t))
    # A library of its own: what is asked about a device is asked once.
    library = kernels.library(capability)
    emulation.configure(shared_limit=shared_limit, capability=capability)
    return library.function("gistkit::cuda::attention_backward_path")(ctypes.byref(params), ctypes.byref(device))


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_who_takes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    assert path(TAKEN) == 1
    for name, changes in LEFT.items():
        device = {k: v for k, v in changes.items() if k in ("capability", "shared_limit")}
        shape = {k: v for k, v in changes.items() if k not in device}
        case = replace(TAKEN, tensors={}, **({"value_dim": 64} | shape))
        assert path(case, **device) == 0, name
    for scale in (0.0, -1.0):
        assert path(TAKEN, scale=scale) == 0
    expanded = replace(TAKEN, tensors={})
    expanded.tensors["grad_out"] = expanded.tensors["grad_out"][:, :1].expand(-1, 4, -1, -1)
    assert path(expanded) == 0
    monkeypatch.setenv("GISTKIT_HOPPER", "0")
    assert path(TAKEN) == 0
