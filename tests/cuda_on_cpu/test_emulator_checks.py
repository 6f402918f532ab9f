"""Each kind of fault that the emulator reports."""

from __future__ import annotations

import ctypes

import emulation
import pytest
import torch

SOURCE = "tests/cuda_on_cpu/kernels/probes.cu"


class FaultParams(ctypes.Structure):
    _fields_ = (("in_", ctypes.c_void_p), ("out", ctypes.c_void_p), ("fault", ctypes.c_int))


STRUCTS = (("kernels/probes.h", "gistkit::cuda::FaultParams", FaultParams),)


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
    "too many threads": "at most 1024 threads, a multiple of 32, got 2048",
    "odd threads": "a multiple of 32, got 33",
    "empty grid": "0 x 1 x 1 blocks",
}


@pytest.mark.parametrize("order", emulation.ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault: str, order: str) -> None:
    given, out = torch.randn(128), torch.full((128,), float("nan"))
    lib = emulation.build("probes", [SOURCE], checked=True, structs=STRUCTS)
    params = FaultParams(given.data_ptr(), out.data_ptr(), list(FAULTS).index(fault))
    arguments = {"inputs": {"in": given}, "outputs": {"out": out}, "order": order, "seed": 2}
    if fault == "none":
        lib.run("gistkit::cuda::fault", params, **arguments)
        assert torch.equal(out, given.view(2, 64).flip(1).flatten())
        return
    with pytest.raises(emulation.EmulatorError) as caught:
        lib.run("gistkit::cuda::fault", params, **arguments)
    assert FAULTS[fault] in str(caught.value)
    assert "fault" in str(caught.value)


def test_a_mirror_of_another_layout_does_not_build() -> None:
    class Wrong(ctypes.Structure):
        _fields_ = (("in_", ctypes.c_void_p), ("fault", ctypes.c_int), ("out", ctypes.c_void_p))

    with pytest.raises(RuntimeError, match="FaultParams::fault"):
        emulation.build("probes", [SOURCE], structs=[("kernels/probes.h", "gistkit::cuda::FaultParams", Wrong)])
