"""Attention's gradients by wgmma on a CPU: who takes what, and what is left beside the contract of all kernels."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, lists_of
from attention_kernels import HOPPER, MMA, WGMMA, backward, check_backward, other, path
from test_attention_contract import of

pytestmark = pytest.mark.usefixtures("build")

BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["gqa", "no lists shared", "72", "many tiles"])
def test_sums_in_any_order(name: str) -> None:
    check_backward(of(name, HOPPER), HOPPER, deterministic=False)


def test_spans_of_any_values_read_nothing_else() -> None:
    """Lists come with spans that are in order. If these are not, what is read and written stays within its bounds."""
    case = Case(200, 290, batch=2, dim=16, bias="bh", **BF16)
    lists = lists_of(case)
    g = torch.Generator().manual_seed(0)
    case.plan.spans[:] = torch.randint(-(2**31), 2**31 - 1, case.plan.spans.shape, generator=g)
    near = torch.rand(case.plan.spans.shape, generator=g) < 0.7
    case.plan.spans[near] = torch.randint(-300, 600, case.plan.spans.shape, generator=g, dtype=torch.int32)[near]
    results = torch.zeros(2, 2, 200, 16, dtype=case.dtype), torch.zeros(2, 2, 200)
    backward(case, HOPPER, lists=lists, results=results)


@pytest.mark.nightly
@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["gqa", "mqa", "128 causal", "many tiles"])
def test_sums_that_start_from_what_is_subtracted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that is not the default, in both orders of sums."""
    monkeypatch.setenv("GISTKIT_HOPPER", "started")
    for deterministic in (True, False):
        check_backward(of(name, HOPPER), HOPPER, deterministic=deterministic, defines=("GISTKIT_TRIALS",))


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


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_who_takes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    assert path("backward", TAKEN) == WGMMA
    for name, changes in LEFT.items():
        device = {k: v for k, v in changes.items() if k in ("capability", "shared_limit")}
        shape = {k: v for k, v in changes.items() if k not in device}
        assert path("backward", other(TAKEN, **{"value_dim": 64} | shape), **device) == MMA, name
    for scale in (0.0, -1.0):
        assert path("backward", TAKEN, scale=scale) == MMA
    expanded = other(TAKEN)
    expanded.tensors["grad_out"] = expanded.tensors["grad_out"][:, :1].expand(-1, 4, -1, -1)
    assert path("backward", expanded) == MMA
    monkeypatch.setenv("GISTKIT_HOPPER", "0")
    assert path("backward", TAKEN) == MMA
