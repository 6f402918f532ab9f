"""The CPU's kernels as AArch64 runs them, generic and NEON, against the references; nothing of torch runs there.

What checks the CUDA kernels under their emulator checks these: it calls a library of ops on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import arm
import emulation
import pytest
import torch
from attention_cases import Case, backward_of, check, forward_of
from pool_params import pool
from rope_params import rope
from test_ancestor_kernels import check_attention
from test_pool_kernels import check as check_pool
from test_pool_kernels import equal_windows, rows_of
from test_rope_kernels import assert_as_good_as_torch, frequencies, heads_of
from test_rope_kernels import test_angle_gradients as check_angle_gradients
from test_trie_kernels import check_gelu, check_mixture
from torch import Tensor
from trie_cases import attended
from trie_params import Trie

from gistkit.ops import reference

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(arm.missing()), reason=f"AArch64 needs Debian's packages {arm.missing()}"),
]

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(params=arm.ISAS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[arm.Kernels]:
    """The library in use, in place of CUDA's."""
    found = arm.Kernels(request.param)
    monkeypatch.setattr(emulation, "build", lambda *_, **__: found)
    yield found


def generic_too(kernels: arm.Kernels, compute: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, Tensor]]:
    """Each result with the instruction set in use, and with generic."""
    mine, level = compute(), kernels.level
    kernels.level = arm.ISAS.index("generic")
    others = compute()
    kernels.level = level
    return list(zip(mine, others, strict=True))


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 64, 64), (1, 20, 14)])
def test_rope(heads: int, dim: int, rotary: int, interleaved: bool, dtype: torch.dtype) -> None:
    query, key = heads_of(2, heads, 17, dim, dtype), heads_of(2, 1, 17, dim, dtype)
    positions = torch.randint(0, 100_000, (1, 2, 17))
    assert_as_good_as_torch(query, key, positions, frequencies(rotary), scaling=1.25, interleaved=interleaved)


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_instruction_sets(kernels: arm.Kernels, interleaved: bool, dtype: torch.dtype) -> None:
    query, key = heads_of(2, 3, 11, 80, dtype), heads_of(2, 2, 11, 80, dtype)
    positions, inv_freq, eps = torch.arange(11)[None, None] * 1000, frequencies(72), torch.finfo(dtype).eps
    for mine, generic in generic_too(kernels, lambda: rope(query, key, positions, inv_freq, interleaved=interleaved)):
        torch.testing.assert_close(mine, generic, rtol=2 * eps, atol=2 * eps)


@by_dtype
def test_window_pool(dtype: torch.dtype) -> None:
    key, value, offsets = rows_of(2, 3, 83, 80, dtype), rows_of(2, 2, 83, 45, dtype), equal_windows(83, 5)
    rotation = {"inv_freq": frequencies(64)[0, 0], "scaling": 1.25, "interleaved": True}
    check_pool(key, value, offsets)
    check_pool(key, value, offsets, positions=torch.arange(17), **rotation)
    check_pool(key, value, torch.tensor([[0, 1, 69, 69, 70], [5, 40, 41, 42, 83]]))


@by_dtype
def test_bits_of_means_are_those_of_generic(kernels: arm.Kernels, dtype: torch.dtype) -> None:
    key, value = rows_of(2, 3, 133, 80, dtype), rows_of(2, 3, 133, 45, dtype)
    key[0, 0, 3, 5], key[0, 1, 20, 0], value[1, 2, 1, 3] = float("nan"), float("inf"), -0.0
    offsets = torch.tensor([[0, 3, 20, 21, 120]])
    for mine, generic in generic_too(kernels, lambda: pool(key, value, offsets)):
        torch.testing.assert_close(mine, generic, rtol=0, atol=0, equal_nan=True)


@by_dtype
def test_bits_of_halves(dtype: torch.dtype) -> None:
    """What is read and written is converted as torch does it: halves of windows of one and of two tokens."""
    # Subnormal numbers, ties, the largest, and what overflows.
    numbers = [1e-8, 6e-8, 6.1e-5, 1.0, 1.00048828125, 1.00390625, 1.001, 65504.0, 65519.0, 3e38, float("inf")]
    rows = torch.tensor(numbers)[None, :, None].to(dtype).expand(1, 11, 22).clone()
    rows[..., ::2] *= -1
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for offsets in (torch.arange(12), torch.arange(0, 12, 2)):
        out, _ = pool(rows[:, None], rows[:, None, :, :0], offsets[None])
        right = torch.stack([rows[0, a:b].to(compute).mean(0).to(dtype) for a, b in offsets.unfold(0, 2, 1)])
        assert torch.equal(out[0, 0], right)


@by_dtype
@pytest.mark.parametrize(("axes", "freq_heads"), [(1, 1), (2, 3)])
def test_gradients_of_angles(axes: int, freq_heads: int, dtype: torch.dtype) -> None:
    shape = {"batch": 2, "heads": (3, 3), "tokens": 17, "rotary": 28, "freq_heads": freq_heads, "axes": axes}
    for interleaved in (False, True):
        check_angle_gradients(dtype=dtype, shared=axes > 1, interleaved=interleaved, **shape)


def forward(case: Case) -> list[Tensor]:
    """[out, lse]"""
    params, results = forward_of(case)
    inputs = case.inputs("query", "key", "value", "key_bias")
    emulation.build("attention", []).run("attention_forward", params, inputs=inputs, outputs=results)
    return list(results.values())


def backward(case: Case, out: Tensor, lse: Tensor) -> list[Tensor]:
    """[grad_query, grad_key, grad_value] and with a bias its gradient."""
    params, grads = backward_of(case, out, lse)
    inputs = {**case.inputs("query", "key", "value", "key_bias", "grad_out", "grad_lse"), "out": out, "lse": lse}
    emulation.build("attention", []).run("attention_backward", params, inputs=inputs, outputs=grads)
    return list(grads.values())


ATTENTION = {
    "causal": Case(70, kind="causal", batch=1, dim=64),
    "gistpool, groups": Case(101, kind="gistpool", batch=1, heads=4, key_heads=2, dim=64),
    "spans of each row": Case(33, 150, dim=16, value_dim=37),
    "odd": Case(45, 67, dim=100, layout="odd", softcap=2.0, bias="h", heads=3, key_heads=1),
    "tokens first": Case(30, 50, kind="full", dim=144, layout="tokens", bias="bi"),
    "few queries": Case(3, 130, kind="causal", heads=4, key_heads=2, dim=100, bias="b"),
    "one query": Case(1, 200, kind="full", heads=2, key_heads=1, dim=64),
}


@by_dtype
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, dtype: torch.dtype) -> None:
    made = ATTENTION[name]
    how = ("queries", "keys", "kind", "batch", "heads", "key_heads", "dim", "value_dim", "softcap", "bias", "layout")
    case = Case(**{option: getattr(made, option) for option in how}, dtype=dtype)
    if dtype == torch.float64:
        for name in case.tensors:
            case.tensors[name] = case.tensors[name].double()
    out, lse = forward(case)
    check(case, [out, lse], ("out", "lse"), form=reference.attention)
    grads = backward(case, out, lse)
    names = ("grad_query", "grad_key", "grad_value", "grad_key_bias")[: len(grads)]
    if dtype == torch.float64:
        right = case.run(dtype)
        for mine, exact in zip([out, lse, *grads[:3]], right[:5], strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11)
    # In halves the result that the gradients start from is rounded, as it is in the form that rounds all.
    check(case, grads, names)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize(("count", "base", "places", "width"), [(30, 10, 3, 68), (9, 2, 3, 13)])
def test_trie(count: int, base: int, places: int, width: int, dtype: torch.dtype) -> None:
    trie = Trie.random(count, base, places)
    check_mixture(trie, 5, width, dtype)
    check_attention(attended(trie, 3, width, dtype), trie.ancestors)
    check_gelu(count, width, dtype, True)
    check_gelu(count, width, dtype, False)


def test_both_instruction_sets_are_compiled_apart(kernels: arm.Kernels) -> None:
    """A case that generic and NEON sum in different orders: the level chooses the kernels."""
    case = Case(3, 130, kind="full", heads=1, dim=100)
    differ = [not torch.equal(mine, other) for mine, other in generic_too(kernels, lambda: tuple(forward(case)))]
    assert any(differ) == (kernels.level > 0)


def test_levels_end_with_neon(kernels: arm.Kernels) -> None:
    kernels.level = len(arm.ISAS)
    with pytest.raises(RuntimeError, match="no such instruction set"):
        forward(Case(3, 20, kind="full", heads=1))
