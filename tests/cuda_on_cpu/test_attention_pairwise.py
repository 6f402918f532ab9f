"""Numbers that are not finite reach what sees them and nothing else, in all kernels of attention, on a CPU."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import Case
from attention_kernels import AMPERE, FP32, HOPPER, WGMMA, backward, forward, path
from emulation import ORDERS
from torch import Tensor

from tests.helpers.nonfinite import BAD, check, gathered_attention

pytestmark = pytest.mark.usefixtures("build")

SPOILED = [("query",), ("key",), ("value",), ("grad_out",), ("key", "value"), ("value", "grad_out")]


def spoil(case: Case, names: tuple[str, ...], seed: int) -> None:
    """Two rows of each tensor: one number of the first, all of the second."""
    g = torch.Generator().manual_seed(seed)
    for turn, name in enumerate(names):
        t = case.tensors[name]
        for count in range(2):
            b, h, row, d = (int(torch.randint(n, (1,), generator=g)) for n in t.shape)
            t[b, h, row, slice(None) if count else slice(d, d + 1)] = BAD[(seed + turn + count) % 3]


def expected(case: Case) -> list[Tensor]:
    inputs = [case.tensors[name] for name in ("query", "key", "value")]
    if case.bias:
        bias = case.tensors["key_bias"]
        inputs.append(bias.expand(case.batch, case.heads, case.keys))
    return gathered_attention(inputs, case.tensors["grad_out"], case.tensors["grad_lse"], case.plan, case.softcap)


def found(case: Case, capability: int | None = None, *, splits: int = 1) -> list[Tensor]:
    capability = capability or (FP32 if case.dtype == torch.float32 else AMPERE)
    results = forward(case, capability, splits=splits)
    return results + backward(case, capability, results=tuple(results))


def check_spoiled(options: dict[str, Any], dtype: torch.dtype, capability: int | None = None) -> None:
    for seed, names in enumerate(SPOILED):
        case = Case(**options, batch=1, dtype=dtype, seed=seed)
        spoil(case, names, seed)
        check(found(case, capability), expected(case), dtype, f"{names}, seed {seed}")


CASES = {
    "causal": {"queries": 90, "kind": "causal"},
    "gistpool": {"queries": 140, "kind": "gistpool", "key_heads": 2, "dim": 40},
    "dodo": {"queries": 70, "keys": 80, "kind": "dodo", "value_dim": 33},
    "random": {"queries": 70, "keys": 150, "heads": 4, "key_heads": 2, "dim": 64, "layout": "odd"},
    "one query": {"queries": 1, "keys": 200, "dim": 64},
    "bias": {"queries": 66, "keys": 130, "bias": "bhi", "softcap": 3.0, "layout": "tokens"},
    "wide": {"queries": 20, "keys": 70, "dim": 256, "value_dim": 130, "heads": 1},
}


@pytest.mark.parametrize("build", ["plain"], indirect=True)
# Of the two halves, which share their kernels' source, one is enough for most cases.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(CASES, (torch.float32, torch.bfloat16)), ("bias", torch.float16), ("wide", torch.float16)],
    ids=str,
)
def test_only_what_sees_them(name: str, dtype: torch.dtype) -> None:
    check_spoiled(CASES[name], dtype)


# What wgmma's kernels take.
BY_WGMMA = {
    "causal": {"queries": 300, "kind": "causal", "dim": 128},
    "gistpool": {"queries": 260, "kind": "gistpool", "heads": 4, "key_heads": 2, "dim": 64},
    "random": {"queries": 130, "keys": 140, "heads": 2, "dim": 64},
    "bias": {"queries": 150, "keys": 280, "bias": "h", "dim": 64},
}


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", BY_WGMMA)
def test_only_what_sees_them_by_wgmma(name: str) -> None:
    case = Case(**BY_WGMMA[name], batch=1, dtype=torch.bfloat16)
    assert path("forward", case) == path("backward", case) == WGMMA
    check_spoiled(BY_WGMMA[name], torch.bfloat16, HOPPER)


def test_parts_that_are_merged() -> None:
    case = Case(3, 500, batch=1, heads=2, dim=64, dtype=torch.bfloat16)
    spoil(case, ("key", "value"), 5)
    check(found(case, splits=3), expected(case), torch.bfloat16, "splits")


@pytest.mark.parametrize("build", ORDERS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_all_checks(dtype: torch.dtype) -> None:
    case = Case(70, 75, kind="causal", batch=2, heads=4, key_heads=2, dim=24, bias="bh", dtype=dtype)
    spoil(case, ("value", "query"), 1)
    check(found(case), expected(case), dtype, "all checks")


def test_a_row_that_sees_only_minus_infinity() -> None:
    """It is empty, as it was; what is not a number in its value has no part in it."""
    case = Case(5, 40, batch=1, heads=1, dim=8, bias="bh")
    case.tensors["key_bias"][:] = -math.inf
    case.tensors["value"][:] = math.nan
    out, lse, *grads = found(case)
    assert (lse == -math.inf).all() and all((t == 0).all() for t in (out, *grads))
