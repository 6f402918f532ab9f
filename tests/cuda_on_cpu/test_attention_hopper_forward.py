"""Attention's forward pass by wgmma on a CPU: what it takes, and what the tests of both paths leave open."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case
from attention_kernels import AMPERE, HOPPER, MMA, WGMMA, check_forward, forward, other, path
from test_attention_contract import of

pytestmark = pytest.mark.usefixtures("build")
BF16, FP16 = torch.bfloat16, torch.float16
TRIALS = {"default": (), "sums": ("GISTKIT_TRIALS",)}


@pytest.fixture(params=["default", pytest.param("sums", marks=pytest.mark.nightly)])
def defines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The default kernel, and the one that is not."""
    if TRIALS[request.param]:
        monkeypatch.setenv("GISTKIT_HOPPER", request.param)
    return TRIALS[request.param]


PLAIN = Case(130, 70, dim=64, dtype=BF16)
TAKEN = {
    "bfloat16": {},
    "float16": {"dtype": FP16},
    "D128": {"dim": 128},
    "D8": {"dim": 8},
    "D72": {"dim": 72},
    "one key": {"keys": 1},
    "few queries of a head of its own": {"queries": 3, "key_heads": 2},
    "bias and cap": {"bias": "bh", "softcap": 2.0},
    "tokens first": {"layout": "tokens"},
}
LEFT = {
    "float32": {"dtype": torch.float32},
    "D136": {"dim": 136},
    "D68": {"dim": 68},
    "values of another dim": {"value_dim": 128},
    "few queries of several heads": {"queries": 128},
    "no keys": {"keys": 0},
    "unaligned": {"layout": "odd"},
}


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_who_takes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, changes in TAKEN.items():
        assert path("forward", other(PLAIN, **changes)) == WGMMA, name
    for name, changes in LEFT.items():
        assert path("forward", other(PLAIN, **changes)) == MMA, name
    for device in ({"splits": 2}, {"capability": AMPERE}, {"shared_limit": 99 * 1024}):
        assert path("forward", PLAIN, **device) == MMA
    expanded = other(PLAIN, key_heads=2)
    expanded.tensors["key"] = expanded.tensors["key"][:, :1].expand(-1, 2, -1, -1)
    assert path("forward", expanded) == MMA
    monkeypatch.setenv("GISTKIT_HOPPER", "0")
    assert path("forward", PLAIN) == MMA


@pytest.mark.parametrize("dim", [8, 24, 40, 56, 64, 72, 96, 112, 120, 128])
def test_head_dims(dim: int) -> None:
    for dtype in (BF16, FP16):
        check_forward(Case(141, 150, batch=1, heads=1, dim=dim, dtype=dtype), HOPPER)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["128 causal", "gqa", "no lists shared", "bias and cap", "bias"])
def test_sums_that_are_not_the_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GISTKIT_HOPPER", "sums")
    check_forward(of(name, HOPPER), HOPPER, defines=("GISTKIT_TRIALS",))


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_that_outgrow_what_they_are_weighed_against(dim: int, defines: tuple[str, ...]) -> None:
    for dtype in (BF16, FP16):
        case = Case(200, 600, kind="full", batch=1, dim=dim, dtype=dtype)
        case.tensors["key"] *= torch.linspace(0.1, 9, case.keys)[:, None]
        check_forward(case, HOPPER, defines=defines)


def test_many_spans() -> None:
    """More than registers hold, in rows of their own."""
    case = Case(140, 400, dim=64, dtype=BF16)
    g = torch.Generator().manual_seed(0)
    cuts = torch.randint(0, 401, (2, 140, 14), generator=g, dtype=torch.int32).sort(-1).values
    case.plan = type(case.plan)(cuts.view(2, 140, 7, 2), 400)
    check_forward(case, HOPPER)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_a_hole_in_what_is_seen_may_hold_anything(defines: tuple[str, ...]) -> None:
    """Every row sees keys on both sides of it."""
    cases = [Case(140, 300, batch=1, dim=64, dtype=BF16) for _ in range(2)]
    for case in cases:
        case.plan.spans[:] = torch.tensor([[0, 70], [90, 300], [300, 300]])
    for name in ("key", "value"):
        cases[0].tensors[name][:, :, 70:90] = torch.nan
    got, expected = (forward(case, capability=HOPPER, defines=defines) for case in cases)
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=2**-7, atol=2**-8)
