"""Each kind of fault that the emulator reports, and the bank conflicts that it counts."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import emulation
import pytest
import torch
from emulation import Int, Pointer, mirror

SOURCE = "tests/cuda_on_cpu/kernels/probes.cu"
FaultParams = mirror("FaultParams", ("in_ out", Pointer), ("fault", Int))
BankParams = mirror(
    "BankParams", ("out", Pointer), ("stride load_stride width times uneven", Int), ("lanes", ctypes.c_uint32)
)


STRUCTS = (
    ("kernels/probes.h", "gistkit::cuda::FaultParams", FaultParams),
    ("kernels/probes.h", "gistkit::cuda::BankParams", BankParams),
)
ALL = 0xFFFFFFFF


FAULTS = {
    "none": "",
    "race of warps": "shared memory",
    "race in warp": "shared memory race",
    "never written": "never written",
    "shared bound": "of shared memory",
    "global bound": "past the end of out",
    "write to input": "which is an input",
    "misaligned": "not a multiple of 8 bytes",
    "race of blocks": "race between blocks in out",
    "atomic and plain": "shared memory race",
    "divergent barriers": "barrier divergence",
    "end before barrier": "ends while",
    "mask without caller": "not in its mask",
    "shuffle from outside": "reads lane 20, which is not in the mask",
    "deadlock": "while lane",
    "end of warp": "ends while|32 threads of the block have ended",
    "copy in flight": "while an asynchronous copy .* is in flight",
    "copy over reads": "asynchronous copy not ordered after a read|is in flight",
    "copy bound": "of shared memory, of which there are",
    "too many threads": "at most 1024 threads, a multiple of 32, got 2048",
    "odd threads": "a multiple of 32, got 33",
    "empty grid": "0 x 1 x 1 blocks",
}


def is_right(fault: str, order: str, checked: bool) -> bool:
    """Whether a kernel that does one thing wrong still turns each block's numbers around."""
    given, out = torch.randn(128), torch.full((128,), float("nan"))
    lib = emulation.build("probes", [SOURCE], checked=checked, structs=STRUCTS)
    params = FaultParams(given.data_ptr(), out.data_ptr(), list(FAULTS).index(fault))
    lib.run("gistkit::cuda::fault", params, inputs={"in": given}, outputs={"out": out}, order=order, seed=2)
    return torch.equal(out, given.view(2, 64).flip(1).flatten())


@pytest.mark.parametrize("order", emulation.ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault: str, order: str) -> None:
    if fault == "none":
        assert is_right(fault, order, True) and is_right(fault, order, False)
        return
    with pytest.raises(emulation.EmulatorError) as caught:
        is_right(fault, order, True)
    assert re.search(FAULTS[fault], str(caught.value)) and "fault" in str(caught.value)


@pytest.mark.parametrize("fault", ["race of warps", "copy in flight", "copy over reads"])
def test_fault_shows_in_the_results_of_a_plain_build(fault: str) -> None:
    assert not all(is_right(fault, order, False) for order in emulation.ORDERS)


def banked(launcher: str, *settings: int, **how: Any) -> emulation.Statistics:
    """What is counted of a launcher of banks, with the settings of its params behind `out`."""
    lib = emulation.build("probes", [SOURCE], checked=how.pop("checked", None), structs=STRUCTS)
    out = torch.full((32,), float("nan"))
    emulation.statistics()
    lib.run(f"gistkit::cuda::{launcher}", BankParams(out.data_ptr(), *settings), outputs={"out": out}, **how)
    assert launcher != "banks" or not out.any()
    return emulation.statistics()


@pytest.mark.parametrize("order", emulation.ORDERS)
@pytest.mark.parametrize(
    ("width", "stride", "lanes", "times", "uneven", "accesses", "wavefronts"),
    [
        (1, 1, ALL, 3, 0, 3, 3),
        (1, 2, ALL, 1, 0, 1, 2),
        (1, 8, ALL, 1, 0, 1, 8),
        (1, 32, ALL, 1, 0, 1, 32),
        (1, 33, ALL, 1, 0, 1, 1),  # a pitch that is odd
        (1, 32, 0xFF, 1, 0, 1, 8),
        (2, 2, ALL, 1, 0, 1, 2),
        (2, 4, ALL, 1, 0, 1, 4),
        (2, 32, 0x00010001, 1, 0, 1, 2),  # one of each half: nothing to wait for but the other half
        (4, 4, ALL, 2, 0, 2, 8),
        (4, 8, ALL, 1, 0, 1, 8),
        (4, 32, ALL, 1, 0, 1, 32),
        (4, 4, 0xFF, 1, 0, 1, 1),
        (1, 8, ALL, 0, 2, 2, 16),  # odd lanes alone, twice: 16 lanes at 2 banks
        (1, 4, ALL, 1, 1, 2, 8),  # all once at 8 banks, then odd lanes again at 4 of them
    ],
)
def test_bank_conflicts_by_hand(
    width: int, stride: int, lanes: int, times: int, uneven: int, accesses: int, wavefronts: int, order: str
) -> None:
    counts = banked("banks", stride, stride, width, times, uneven, lanes, checked=True, order=order)
    assert (counts.shared_stores, counts.store_wavefronts) == (accesses, wavefronts)
    assert (counts.shared_loads, counts.load_wavefronts) == (accesses, wavefronts)


@pytest.mark.parametrize(("width", "wavefronts"), [(1, 1), (2, 2), (4, 4)])
def test_the_same_words_are_loaded_without_conflict(width: int, wavefronts: int) -> None:
    counts = banked("banks", 4, 0, width, 1, 0, ALL, checked=True)
    assert (counts.shared_loads, counts.load_wavefronts) == (1, wavefronts)


@pytest.mark.parametrize(("stride", "share"), [(4, 0.0), (36, 0.0), (32, 1.0)])
def test_bank_conflicts_of_matrices(stride: int, share: float) -> None:
    counts = banked("matrix_banks", stride)
    assert counts.matrix_loads == 4 and counts.conflicting_loads == 4 * share


def test_an_unchecked_build_counts_no_shared_accesses() -> None:
    counts = banked("banks", 8, 8, 1, 1, 0, ALL)
    assert (counts.shared_loads, counts.load_wavefronts, counts.shared_stores, counts.store_wavefronts) == (0, 0, 0, 0)


def test_a_mirror_of_another_layout_does_not_build() -> None:
    wrong = mirror("Wrong", ("in_", Pointer), ("fault", Int), ("out", Pointer))
    with pytest.raises(RuntimeError, match="FaultParams::fault"):
        emulation.build("probes", [SOURCE], structs=[("kernels/probes.h", "gistkit::cuda::FaultParams", wrong)])
