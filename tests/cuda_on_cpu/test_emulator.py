"""The emulator itself: a kernel with attention's machinery runs right, and every way of breaking it is noticed."""

from __future__ import annotations

import emulation
import pytest
import torch
from emulation import Int, Pointer, mirror

SOURCE = "tests/cuda_on_cpu/kernels/masked_product.cu"
NAMES = {torch.bfloat16: "masked_product_bfloat16", torch.float16: "masked_product_float16"}
Params = mirror("Params", ("q k v out spans", Pointer), ("rows", Int))


STRUCTS = (("kernels/masked_product.h", "gistkit::cuda::MaskedProductParams", Params),)


def library(checked: bool, *defines: str) -> emulation.Library:
    return emulation.build("masked_product", [SOURCE], checked=checked, defines=defines, structs=STRUCTS)


def error_of(lib: emulation.Library, rows: int, dtype: torch.dtype, **how: object) -> float:
    """Runs the kernel on random numbers; its largest error as a share of the largest expected number."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = ((torch.randn(rows, 64, generator=generator) / 4).to(dtype) for _ in range(3))
    row = torch.arange(rows, dtype=torch.int32)
    spans = torch.stack([(row - 70).clamp(min=0), row + 1], -1)
    spans[3::7] = 0
    out = torch.full_like(q, float("nan"))
    params = Params(*(x.data_ptr() for x in (q, k, v, out, spans)), rows)
    inputs = {"q": q, "k": k, "v": v, "spans": spans}
    lib.run(f"gistkit::cuda::{NAMES[dtype]}", params, inputs=inputs, outputs={"out": out}, **how)
    key = torch.arange(rows)
    visible = (key >= spans[:, :1]) & (key < spans[:, 1:])
    expected = (q.double() @ k.double().T).where(visible, 0) @ v.double()
    return float((out.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def tolerance(dtype: torch.dtype) -> float:
    return 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("order", emulation.ORDERS)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 203])
def test_right_kernel_passes_every_check(rows: int, dtype: torch.dtype, order: str) -> None:
    assert error_of(library(True), rows, dtype, order=order, seed=rows) < tolerance(dtype)


@pytest.mark.parametrize("copies", emulation.COPIES)
def test_right_kernel_for_any_moment_of_copying(copies: str) -> None:
    assert error_of(library(False), 203, torch.bfloat16, copies=copies) < tolerance(torch.bfloat16)


def noticed(lib: emulation.Library, rows: int = 203) -> str:
    """What was found in the first of the three orders that shows it; empty where the kernel passes all three."""
    for order in emulation.ORDERS:
        try:
            error = error_of(lib, rows, torch.bfloat16, order=order, seed=3)
        except emulation.EmulatorError as found:
            return str(found)
        if not error < tolerance(torch.bfloat16):
            return "wrong result"
    return ""


def test_nothing_is_noticed_where_nothing_is_wrong() -> None:
    assert noticed(library(True)) == "" and noticed(library(False)) == ""


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        ("BARRIER_BEFORE_REFILL", "asynchronous copy not ordered after a read"),
        ("BARRIER_AFTER_WAIT", "race"),
        ("WAIT", "in flight"),
        ("WARP_BARRIER", "race"),
        ("SWIZZLE", "wrong result"),
        ("SPAN", "wrong result"),
        ("INITIALISATION", "wrong result"),
        ("GRID", "wrong result"),
        ("CONVERGENCE", "divergence"),
        ("EARLY_EXIT", "have ended"),
        ("BOUND", "past the end of out"),
        ("SHARED_SIZE", "of shared memory"),
    ],
)
def test_mutation_is_caught_by_the_checked_build(mutation: str, message: str) -> None:
    found = noticed(library(True, f"BREAK_{mutation}"))
    assert message in found
    assert found == "wrong result" or "masked_product" in found


@pytest.mark.parametrize("mutation", ["BARRIER_BEFORE_REFILL", "BARRIER_AFTER_WAIT", "WAIT", "WARP_BARRIER", "SWIZZLE"])
def test_mutation_is_caught_by_the_plain_build(mutation: str) -> None:
    assert noticed(library(False, f"BREAK_{mutation}"))


def test_bank_conflicts_are_counted() -> None:
    for defines, conflicting in (((), 0.0), (("BREAK_BANKS",), 1.0)):
        emulation.statistics()
        error_of(library(False, *defines), 64, torch.bfloat16)
        counts = emulation.statistics()
        assert counts.matrix_loads > 0
        assert counts.conflicting_loads / counts.matrix_loads == conflicting
