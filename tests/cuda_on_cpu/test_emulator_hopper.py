"""The emulator of sm_90a: a kernel with attention's roles runs right, and every way of breaking it is noticed."""

from __future__ import annotations

import time

import emulation
import pytest
import torch
from attention_cases import Rows
from emulation import Int, Pointer, mirror

SOURCE = "tests/cuda_on_cpu/kernels/roles.cu"
RolesParams = mirror("RolesParams", ("query key value out", Rows), ("sums counters", Pointer), ("rows mistake", Int))


STRUCTS = (
    ("kernels/roles.h", "gistkit::ConstRows", Rows),
    ("kernels/roles.h", "gistkit::cuda::RolesParams", RolesParams),
)

# In the order of the enum Mistake: what is said of it by a checked build and by a plain one; "": nothing need be.
MISTAKES = {
    "none": ("", ""),
    "no init fence": ("without mbarrier_init_fence", "without mbarrier_init_fence"),
    "no barrier after init": ("initialis", "initialis"),
    "no wait": ("in flight", "changed before the wait"),
    "parity": ("deadlock", "deadlock"),
    "few bytes": ("in flight", "bytes"),
    "many bytes": ("bytes", "deadlock"),
    "many arrivals": ("shared memory", "changed before the wait"),
    "early release": ("shared memory", "has changed before the wait"),
    "no fence": ("without wgmma_fence", "without wgmma_fence"),
    "no commit": ("wrong result", "wrong result"),
    "no product wait": ("wrong result", "wrong result"),
    "early sums": ("before the wait", "before the wait"),
    "registers of A": ("registers of A have changed", "registers of A have changed"),
    "step": ("wrong result", "wrong result"),
    "lead": ("wrong result", "wrong result"),
    "one warp less": ("another warp of the warpgroup", "another warp of the warpgroup"),
    "no async fence": ("without fence_async_shared", ""),
    "count": ("while others wait with", "while others wait with"),
    "no named barrier": ("race", "wrong result"),
    "no read wait": ("has changed before bulk_wait_read", "has changed before bulk_wait_read"),
    "end before read": ("ends before the copy", "ends before the copy"),
    "release before written": ("before bulk_wait", "before bulk_wait"),
    "wait for later": ("load_acquire", "load_acquire"),
}


def run(rows: int, checked: bool, mistake: str = "none", **how: object) -> bool:
    """Whether the results are right; raises what the emulator finds."""
    library = emulation.build("roles", [SOURCE], checked=checked, structs=STRUCTS)
    generator = torch.Generator().manual_seed(rows)
    query, key, value = (torch.randn(rows, 128, generator=generator).div(4).bfloat16() for _ in range(3))
    out = torch.full((rows, 128), float("nan")).bfloat16()
    tiles = (rows + 63) // 64
    sums, counters = torch.zeros(tiles, 4, 16, 8, 4, 2, 2), torch.zeros(2, dtype=torch.int32)
    pointers = sums.data_ptr(), counters.data_ptr()
    params = RolesParams(*map(Rows.of, (query, key, value, out)), *pointers, rows, list(MISTAKES).index(mistake))
    inputs, outputs = {"query": query, "key": key, "value": value}, {"out": out, "sums": sums, "counters": counters}
    library.run("gistkit::cuda::roles", params, inputs=inputs, outputs=outputs, capability=90, **how)
    scores = query.double() @ key.double().T
    expected = scores.bfloat16().double() @ value.double()
    # [tile, warp, 8 columns, row, 2 columns, half of the rows, column]
    rounded = sums.permute(0, 1, 5, 3, 2, 4, 6).reshape(tiles * 64, 128)[:rows].double()
    bound = 2.0**-8 * expected.abs().max()
    return bool(((out.double() - expected).abs() < bound).all() and ((rounded - expected).abs() < bound).all())


@pytest.mark.parametrize("order", emulation.ORDERS)
@pytest.mark.parametrize("rows", [1, 64, 203, 330])
def test_right_kernel_passes_every_check(rows: int, order: str) -> None:
    assert run(rows, True, order=order, seed=rows)
    assert run(rows, False, order=order, seed=rows)


def noticed(mistake: str, checked: bool) -> list[str]:
    """What was found in each of the three orders; empty where the kernel passes."""
    found = []
    for order in emulation.ORDERS:
        try:
            found.append("" if run(330, checked, mistake, order=order, seed=3) else "wrong result")
        except emulation.EmulatorError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "plain"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_noticed(mistake: str, checked: bool) -> None:
    expected, found = MISTAKES[mistake][not checked], noticed(mistake, checked)
    if expected:
        assert any(expected in text for text in found), found
    else:
        assert not any(found), found


def test_a_device_of_another_capability_has_no_such_kernel() -> None:
    with pytest.raises(emulation.EmulatorError, match="cudaError_t 1"):
        library = emulation.build("roles", [SOURCE], structs=STRUCTS)
        x = torch.zeros(64, 128).bfloat16()
        library.run("gistkit::cuda::roles", RolesParams(*[Rows.of(x)] * 4, 0, 0, 64, 0), capability=100)


def test_plain_build_is_fast() -> None:
    run(64, False)
    began = time.process_time()
    run(200, False)
    assert time.process_time() - began < 2
