"""The instructions of sm_90a by themselves, against the PTX ISA: emulated, and on a GPU that has them.

As in test_primitives.py, expected values are written from that document and not from the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from emulation import EmulatorError
from primitives import Array, Backend, Emulated
from test_primitives import BACKENDS, LANE, gpu, packed, places_a

hopper = [
    *gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of 9.0 here"
    ),
]


@pytest.fixture(params=[pytest.param(name, marks=hopper if name == "device" else ()) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def words(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, 2**32, shape, dtype=np.uint32)


def mbarrier(backend: Backend) -> None:
    """A barrier of two arrivals from its begin through two phases; one of bytes; one of arrivals by another warp."""
    source = words(64, 4)
    # Parity 1 counts as over at first; then 0 is, from the second arrival on; then 1. A copy of half does not end it.
    said = [0, 1, 0, 1, 0, 0, 1, 0]
    expected = np.concatenate([said, source[:32].ravel(), source[:31:-1].ravel()]).astype(np.uint32)
    np.testing.assert_array_equal(backend.run("mbarrier", expected, source=source), expected)


def bulk_load(backend: Backend, begin: int, to: int, size: int) -> None:
    source = words(256)
    expected = np.full(512, 0xEEEEEEEE, np.uint32)
    expected[to // 4 : (to + size) // 4] = source[begin // 4 : (begin + size) // 4]
    found = backend.run("bulk_copy", expected, source=source, **{"from": begin}, to=to, bytes=size)
    np.testing.assert_array_equal(found, expected)


def bulk_add(backend: Backend) -> None:
    """Whole numbers: no order of the sums rounds."""
    generator = np.random.default_rng(0)
    first, *terms = (generator.permutation(256).astype(np.float32) for _ in range(3))
    expected = first + terms[0] + terms[1]
    found = backend.run("bulk_addition", expected, first=first, terms=np.stack(terms))
    np.testing.assert_array_equal(found, expected)


# Sizes [batch, heads, length, dim], rows of a box, and its place: column, row, head, batch row.
BOXES = {
    "inside": ((2, 3, 200, 128), 64, (64, 96, 1, 1)),
    "of other rows": ((2, 3, 200, 64), 128, (0, 5, 2, 0)),
    "at the end": ((1, 2, 100, 64), 64, (0, 64, 1, 0)),
    "before the begin": ((1, 2, 100, 64), 64, (0, -7, 0, 0)),
    "beyond": ((1, 2, 100, 64), 64, (0, 128, 0, 0)),
    "of few columns": ((1, 2, 70, 40), 64, (0, 0, 1, 0)),
    "of the last columns": ((2, 1, 70, 72), 64, (64, 0, 0, 1)),
    "beyond the heads": ((1, 2, 70, 64), 64, (0, 0, 2, 0)),
}


def boxes(name: str) -> tuple[dict[str, int], Array, Array, Array]:
    """Arguments; the tensor with a gap after each head, as [batch, length, heads, dim]; whether a box's elements are in
    it; their places in the tensor, flat."""
    (batch, heads, length, dim), rows, (x, y, z, w) = BOXES[name]
    tensor = words(batch * length * heads * (dim + 8)).astype(np.uint16)
    strides = {"row_stride": 2 * heads * (dim + 8), "head_stride": 2 * (dim + 8)}
    strides["batch_stride"] = length * strides["row_stride"]
    numbers = dict(batch=batch, heads=heads, length=length, dim=dim, box_rows=rows, x=x, y=y, z=z, w=w)
    row, column = np.arange(rows)[:, None] + y, np.arange(64)[None] + x
    there = (row >= 0) & (row < length) & (column < dim) & (z < heads) & (w < batch)
    place = ((w * length + row) * heads + z) * (dim + 8) + column
    return strides | numbers, tensor, there, place


def swizzle(rows: Array) -> Array:
    """Rows of 64 elements as the 128-byte swizzle has them: chunk c of row r, of 16 bytes, lies at c xor r % 8."""
    chunks = rows.reshape(len(rows), 8, 8)
    r = np.arange(len(rows))[:, None]
    return chunks[r, np.arange(8)[None] ^ r % 8].reshape(rows.shape)


def tensor_load(backend: Backend, name: str) -> None:
    numbers, tensor, there, place = boxes(name)
    expected = swizzle(np.where(there, tensor[np.where(there, place, 0)], 0).astype(np.uint16))
    found = backend.run("tensor_loads", expected, tensor=tensor, box=np.zeros(1, np.uint16), **numbers)
    np.testing.assert_array_equal(found, expected)


def tensor_store(backend: Backend, name: str) -> None:
    numbers, tensor, there, place = boxes(name)
    box = words(numbers["box_rows"], 64).astype(np.uint16)
    expected = np.full_like(tensor, 0xFFFF)
    expected[place[there]] = swizzle(box)[there]  # the swizzle is its own inverse
    found = backend.run("tensor_stores", expected, tensor=np.zeros(1, np.uint16), box=box, **numbers)
    np.testing.assert_array_equal(found, expected)


def shared_words(backend: Backend) -> None:
    given = words(32, 4) & 0x7F7FFFFF  # no NaN, whose bits a float may not keep
    expected = np.stack([given] * 5)
    np.testing.assert_array_equal(backend.run("shared_words", expected, words=given), expected)


def store_matrix(backend: Backend) -> None:
    """Lane 8 i + j gives the address of row j of matrix i; lane 4 j + q has its elements 2 q and 2 q + 1 in word i."""
    given, rows = words(32, 4), LANE * 13 % 32
    expected = np.zeros((32, 8), np.uint16)
    halves = given.view(np.uint16).reshape(32, 4, 2)  # lane, matrix, low and high half
    for lane in range(32):
        matrix, row = divmod(lane, 8)
        expected[rows[lane]] = halves[4 * row : 4 * row + 4, matrix].ravel()
    found = backend.run("store_matrix", expected, words=given, rows=rows.astype(np.int32))
    np.testing.assert_array_equal(found, expected)


def named_barriers(backend: Backend) -> None:
    values = np.random.default_rng(0).permutation(256).astype(np.int32)
    expected = np.full(256, -1, np.int32)
    expected[64:128] = values[63::-1]
    expected[128:] = values[383 - (np.arange(128, 256) ^ 32)]
    np.testing.assert_array_equal(backend.run("named_barriers", expected, values=values), expected)


def registers_of_warpgroups(backend: Backend) -> None:
    values = np.arange(1000, 1256, dtype=np.int32)
    lane = np.arange(256) % 32
    expected = (values + np.where(np.arange(256) < 128, lane, -lane)).astype(np.int32)
    np.testing.assert_array_equal(backend.run("registers_of_warpgroups", expected, values=values), expected)


def turns(backend: Backend) -> None:
    values = np.array([5, 1, 9, 2, 6, 5, 3, 5], np.int32)
    expected = np.concatenate([values.cumsum(), [0, 8]]).astype(np.int32)
    np.testing.assert_array_equal(backend.run("turns", expected, values=values), expected)


def image(matrix: Array, name: str, transposed: bool, lead: int, size: int) -> Array:
    """An operand [rows, 64 of k] in `size` bytes: as it is, or 64 of its rows transposed, others `lead` bytes on."""
    memory = np.full(size // 2, 0x7FFF, np.uint16)  # NaN
    bits = packed(matrix.reshape(-1, 2), name).view(np.uint16).reshape(matrix.shape)
    blocks = [bits[i : i + 64].T for i in range(0, len(bits), 64)] if transposed else [bits]
    for i, block in enumerate(blocks):
        memory[i * lead // 2 : i * lead // 2 + block.size] = swizzle(block).ravel()
    return memory.view(np.uint32)


def wgmma(backend: Backend, dtype: str, columns: int, kind: str, accumulate: bool) -> None:
    """One of four steps of k. Whole numbers, so that no order of summation rounds; NaN beside what belongs to it."""
    registers, transposed = kind.startswith("r"), [letter == "t" for letter in kind[-2:]]
    generator = np.random.default_rng(columns)
    a, b = generator.integers(-99, 99, (64, 64)), generator.integers(-99, 99, (columns, 64))
    c = generator.permutation(64 * columns).reshape(64, columns)
    k, lead = 2, 12 * 1024
    step = slice(16 * k, 16 * k + 16)
    expected = a[:, step] @ b[:, step].T + accumulate * c
    for matrix in (a, b):
        matrix[:, 16 * k + 16 :] = 10**4  # beyond what the step reads
    # Warp w holds rows 16 w and on; a lane's places are those of the sums of mma, 8 columns after the other.
    lane, warp, i = np.arange(128)[:, None] % 32, np.arange(128)[:, None] // 32, np.arange(columns // 2)
    row, column = 16 * warp + 8 * (i // 2 % 2) + lane // 4, i // 4 * 8 + lane % 4 * 2 + i % 2
    if registers:
        rows, depth = places_a()
        fragments = np.concatenate([a[16 * w + rows, 16 * k + depth] for w in range(4)])
        operand, start_a = packed(fragments, dtype), 0
    else:
        operand, start_a = image(a, dtype, transposed[0], 0, 8192), k * (2048 if transposed[0] else 32)
    c_fragment = c[row, column].astype(np.float32)
    found = backend.run(
        "warpgroup_product",
        c_fragment,
        a=operand,
        b=image(b, dtype, transposed[1], lead, 32768),
        c=c_fragment,
        columns=columns,
        bfloat16=int(dtype == "BFloat16"),
        registers=int(registers),
        transpose_a=int(transposed[0]),
        transpose_b=int(transposed[1]),
        accumulate=int(accumulate),
        start_a=start_a,
        start_b=k * (2048 if transposed[1] else 32),
        lead=lead,
    )
    np.testing.assert_array_equal(found, expected[row, column].astype(np.float32))


def wgmma_wait(backend: Backend) -> None:
    a = np.random.default_rng(0).integers(-99, 99, (64, 64))
    product = a[:, :16] @ a[:, :16].T
    lane, warp, i = np.arange(128)[:, None] % 32, np.arange(128)[:, None] // 32, np.arange(32)
    row, column = 16 * warp + 8 * (i // 2 % 2) + lane // 4, i // 4 * 8 + lane % 4 * 2 + i % 2
    expected = np.stack([product[row, column], 2 * product[row, column]]).astype(np.float32)
    found = backend.run("warpgroup_groups", expected, a=image(a, "BFloat16", False, 0, 8192))
    np.testing.assert_array_equal(found, expected)


CASES: dict[str, Callable[[Backend], None]] = {
    "mbarrier": mbarrier,
    "bulk_load": partial(bulk_load, begin=0, to=0, size=1024),
    "bulk_load of a part": partial(bulk_load, begin=80, to=1072, size=208),
    "bulk_add": bulk_add,
    **{f"tensor_load {name}": partial(tensor_load, name=name) for name in BOXES},
    **{f"tensor_store {name}": partial(tensor_store, name=name) for name in BOXES if "begin" not in name},
    "loads and stores of shared memory": shared_words,
    "store_matrix_x4": store_matrix,
    "named barriers": named_barriers,
    "setmaxnreg, laneid": registers_of_warpgroups,
    "load_acquire, add_release": turns,
    "wgmma_wait": wgmma_wait,
}
for dtype in ("BFloat16", "Float16"):
    for columns in (64, 128):
        for kind in ("nn", "nt", "tn", "tt", "rnn", "rnt"):
            for accumulate in (False, True):
                suffix = " accumulated" * accumulate
                CASES[f"Wgmma<{dtype}, {columns}> {kind}{suffix}"] = partial(
                    wgmma, dtype=dtype, columns=columns, kind=kind, accumulate=accumulate
                )


@pytest.mark.parametrize("case", CASES)
def test_primitive(backend: Backend, case: str) -> None:
    CASES[case](backend)


# Nothing of a box that lies outside is written, and the rows beside it are as empty.
EMPTY = ("tensor_load beyond", "tensor_load beyond the heads", "tensor_store beyond", "tensor_store beyond the heads")


@pytest.mark.parametrize("case", [case for case in CASES if case not in EMPTY])
def test_a_small_error_is_noticed(case: str) -> None:
    broken = Emulated(defines=("BREAK_PRIMITIVES",))
    with pytest.raises((AssertionError, EmulatorError)):
        CASES[case](broken)
