"""Every primitive of the kernels by itself, against the PTX ISA and CUDA's guide: emulated, and on a GPU.

Expected values are written from those documents, by formulas for rows and columns or in float64, and not from the
emulator. A case that passes emulated and fails on a GPU is named after what the emulator is wrong about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from emulation import ROOT, EmulatorError
from primitives import FUNCTIONS, SOURCES, Array, Backend, Device, Emulated, nvcc

LANE = np.arange(32)
FLOATS = {"BFloat16": (8, 7), "Float16": (5, 10)}  # bits of exponent and of mantissa

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(nvcc() is None, reason="no nvcc on PATH or in CUDA_HOME"),
]

BACKENDS = {
    "emulated": Emulated(),
    "reverse": Emulated(order="reverse"),
    "checked": Emulated(checked=True, order="random"),
    "device": Device(),
}


@pytest.fixture(params=[pytest.param(name, marks=gpu if name == "device" else ()) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def elementwise(backend: Backend, function: str, first: Array, second: Array | None = None) -> Array:
    """Two 32-bit words for each element of the arguments, which have 32 bits each."""
    words = np.zeros((len(first), 2), np.uint32)
    words[:, 0] = first.view(np.uint32)
    if second is not None:
        words[:, 1] = second.view(np.uint32)
    given = {"count": len(first), "function": FUNCTIONS.index(function)}
    return backend.run("elementwise", words, words=words, **given)


def same(found: Array, expected: Array) -> None:
    """The same numbers, signs of zeros included; any NaN is as good as another."""
    np.testing.assert_array_equal(found, expected)
    signs = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[signs], np.signbit(expected)[signs])


def opaque(backend: Backend) -> None:
    x = np.array([0, 1, -1, 12345, 2**31 - 1, -(2**31)], np.int32)
    np.testing.assert_array_equal(elementwise(backend, "opaque", x)[:, 0].view(np.int32), x)


def exp2_fast(backend: Backend) -> None:
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e30, -1e30, 127.99999, 128, -126, -126.00001, -150]
    x = np.concatenate([edges, np.arange(-160, 130, 0.37), np.arange(-155, 128)]).astype(np.float32)
    found = elementwise(backend, "exp2_fast", x)[:, 0].view(np.float32).astype(np.float64)
    # .ftz: a subnormal argument counts as zero, a subnormal result becomes zero.
    exact = np.exp2(x.astype(np.float64))
    exact = np.where(exact < 2.0**-126, 0.0, np.where(exact >= 2.0**128, np.inf, exact))
    exact = np.where(np.abs(x) < 2.0**-126, 1.0, exact)
    np.testing.assert_allclose(found, exact, rtol=2.0**-22, atol=0)
    assert not np.signbit(found[found == 0]).any()


def library_function(backend: Backend, name: str, exact_function: Callable[[Array], Array]) -> None:
    """Within two units in the last place, the most that CUDA's guide allows expf, logf or tanhf."""
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e-30, 1e30, -1e30, 88.7, 88.8, -87.5, -103, -104]
    x = np.concatenate([edges, np.linspace(-20, 20, 999), np.logspace(-37, 38, 500)]).astype(np.float32)
    found = elementwise(backend, name, x)[:, 0].view(np.float32)
    exact = exact_function(x.astype(np.float64))
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    finite = np.isfinite(expected)
    same(found[~finite], expected[~finite])
    assert (np.abs(found[finite] - exact[finite]) <= 2 * np.abs(np.spacing(expected[finite]))).all()


def fmaxf(backend: Backend) -> None:
    values = np.array([0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40], np.float32)
    x, y = (side.ravel() for side in np.meshgrid(values, values))
    found = elementwise(backend, "fmaxf", x, y)[:, 0].view(np.float32)
    # A NaN loses against every number.
    same(found, np.where(np.isnan(x), y, np.where(np.isnan(y), x, np.maximum(x, y))))


def fmaf(backend: Backend) -> None:
    """x y - 1, rounded once: float64 holds it exactly."""
    x, y = np.random.default_rng(0).uniform(0.5, 2, (2, 1000)).astype(np.float32)
    y[:500] = 1 / x[:500]
    found = elementwise(backend, "fmaf", x, y)[:, 0].view(np.float32)
    same(found, (x.astype(np.float64) * y - 1).astype(np.float32))


def fdividef(backend: Backend) -> None:
    """Within two units in the last place for divisors up to 2^126."""
    x, y = np.random.default_rng(0).uniform(-2, 2, (2, 1000)).astype(np.float32)
    y[:500] *= np.float32(2.0) ** np.arange(-100, 100, 0.4, dtype=np.float32)
    found = elementwise(backend, "__fdividef", x, y)[:, 0].view(np.float32)
    exact = x.astype(np.float64) / y
    normal = np.abs(exact) >= 2.0**-126
    assert (np.abs(found - exact) <= 2 * np.spacing(np.abs(exact).astype(np.float32)))[normal].all()


def half_value(bits: Array, name: str) -> Array:
    """What 16 bits mean: sign, exponent with a bias, mantissa; subnormals, infinities and NaNs as in IEEE 754."""
    exponent_bits, mantissa_bits = FLOATS[name]
    bits = bits.astype(np.int64)
    exponent, mantissa = bits >> mantissa_bits & 2**exponent_bits - 1, bits & 2**mantissa_bits - 1
    bias = 2 ** (exponent_bits - 1) - 1
    leading = np.where(exponent > 0, 2**mantissa_bits, 0)
    value = np.ldexp((leading + mantissa).astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    value = np.where(exponent == 2**exponent_bits - 1, np.where(mantissa > 0, np.nan, np.inf), value)
    return np.where(bits >> 15 & 1, -value, value)


def rounded(x: Array, name: str) -> Array:
    """To the nearest number of 16 bits, of two that are as near to the one whose last bit is 0."""
    exponent_bits, mantissa_bits = FLOATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = np.maximum(np.frexp(x.astype(np.float64))[1] - 1, 1 - bias)
    value = np.ldexp(np.rint(np.ldexp(x.astype(np.float64), mantissa_bits - exponent)), exponent - mantissa_bits)
    return np.where(np.abs(value) >= 2.0 ** (bias + 1), np.copysign(np.inf, value), value)


def pack(backend: Backend, name: str) -> None:
    exponent_bits, mantissa_bits = FLOATS[name]
    infinity = np.array([2**exponent_bits - 1 << mantissa_bits])
    bits = np.arange(0, infinity[0] - 1, 5)
    value = half_value(bits, name)
    ties = (value + half_value(bits + 1, name)) / 2
    # Half a unit above the largest number is the first that becomes infinity.
    largest, below = half_value(infinity - 1, name), half_value(infinity - 2, name)
    ties = np.append(ties, largest + (largest - below) / 2).astype(np.float32)
    edges = np.array([0, 1e-45, 1e-40, 1e-8, 1e30, 3.4e38, np.inf, np.nan], np.float32)
    near = [np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))]
    x = np.concatenate([edges, value.astype(np.float32), *near])
    x = np.concatenate([x, -x])
    found = elementwise(backend, f"pack<{name}>", x, x[::-1].copy())[:, 0]
    same(half_value(found & 0xFFFF, name), rounded(x, name))
    same(half_value(found >> 16, name), rounded(x[::-1], name))


def unpack(backend: Backend, name: str) -> None:
    low = np.arange(2**16, dtype=np.uint32)
    high = low * 40503 % 2**16
    found = elementwise(backend, f"unpack<{name}>", low | high << 16).view(np.float32)
    same(found[:, 0], half_value(low, name))
    same(found[:, 1], half_value(high, name))


def store_16(backend: Backend) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (32, 4), dtype=np.uint32)
    places = (LANE * 17 % 39).astype(np.int32)
    expected = np.full((40, 4), 0xFFFFFFFF, np.uint32)
    expected[places] = words
    np.testing.assert_array_equal(backend.run("store", expected, words=words, places=places), expected)


def copy_async_16(backend: Backend) -> None:
    """Zero to 16 bytes from and to any multiples of 16, the last of them at the end of the source."""
    source = np.random.default_rng(0).integers(1, 256, 16 * 40 - 11, dtype=np.uint8)
    copies = np.stack([LANE * 13 % 39 * 16, LANE * 11 % 64 * 16, LANE % 17], -1).astype(np.int32)
    copies[31, ::2] = 16 * 39, 5
    expected = np.full(1024, 0xEE, np.uint8)
    for begin, to, size in copies:
        expected[to : to + 16] = [*source[begin : begin + size], *[0] * (16 - size)]
    np.testing.assert_array_equal(backend.run("copy", expected, source=source, copies=copies), expected)


def copy_async_wait(backend: Backend, newest: int) -> None:
    source = np.random.default_rng(newest).integers(0, 2**32, (4, 32, 4), dtype=np.uint32)
    np.testing.assert_array_equal(backend.run("copy_groups", source, source=source, newest=newest), source)


def shared_address(backend: Backend, size: int) -> None:
    """Addresses count bytes, and dynamic shared memory of any size begins at a multiple of 1024."""
    source = np.array([1, 2, 3, 4], np.uint32)
    first, second, last, variable, word = backend.run(
        "shared_memory", np.zeros(5, np.uint32), source=source, bytes=size
    )
    assert first % 1024 == 0
    assert (second - first, last - first) == (1, size - 1)
    assert not first <= variable <= last and variable % 4 == 0
    assert word == 4 + 7


def load_matrix(backend: Backend, transposed: bool, rows: Array) -> None:
    """Lane 8 i + j gives the address of row j of matrix i; register i is of matrix i."""
    elements = (np.arange(32 * 8) * 251 + 7).astype(np.uint16).reshape(32, 8)
    matrices = elements[rows].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    # A thread holds columns 2 (lane % 4) and the next one of row lane / 4.
    low, high = (matrices[:, LANE // 4, LANE % 4 * 2 + half].astype(np.uint32) for half in (0, 1))
    name = "load_matrix_transposed" if transposed else "load_matrix"
    expected = (low | high << 16).T
    found = backend.run(name, expected, elements=elements, rows=rows.astype(np.int32))
    np.testing.assert_array_equal(found, expected)


def places_a() -> tuple[Array, Array]:
    """Row and column of element i of a lane's fragment of a, [32, 8] each; `places_b` and `places_c` alike."""
    lane, i = LANE[:, None], np.arange(8)
    row = lane // 4 + np.where((i < 2) | ((i >= 4) & (i < 6)), 0, 8)
    return row, lane % 4 * 2 + i % 2 + np.where(i < 4, 0, 8)


def places_b() -> tuple[Array, Array]:
    lane, i = LANE[:, None], np.arange(4)
    return lane % 4 * 2 + i % 2 + np.where(i < 2, 0, 8), lane // 4 + 0 * i


def places_c() -> tuple[Array, Array]:
    lane, i = LANE[:, None], np.arange(4)
    return lane // 4 + np.where(i < 2, 0, 8), lane % 4 * 2 + i % 2


def packed(numbers: Array, name: str) -> Array:
    """Pairs of numbers that 16 bits hold exactly, the first in the low half."""
    if name == "Float16":
        bits = numbers.astype(np.float16).view(np.uint16)
    else:
        bits = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits[:, 0::2] | bits[:, 1::2].astype(np.uint32) << 16


def mma(backend: Backend, name: str, case: str) -> None:
    """Whole numbers, so that no order of summation rounds; no two elements of a matrix are equal."""
    generator = np.random.default_rng(0)
    a = generator.permutation(256).reshape(16, 16) - 128
    b = generator.permutation(128).reshape(16, 8) - 64
    c = generator.permutation(128).reshape(16, 8) * 11 + 5000
    zero, one = np.zeros((16, 8), int), np.eye(16, dtype=int)
    a, b, c = {
        "left half of a": (a, one[:, :8], zero),
        "right half of a": (a, one[:, 8:], zero),
        "b": (one, b, zero),
        "c": (0 * a, b, c),
        "product": (a, b, zero),
        "sum": (a, b, c),
    }[case]
    given = {"a": packed(a[places_a()], name), "b": packed(b[places_b()], name)}
    c_fragment = c[places_c()].astype(np.float32)
    found = backend.run(f"product_{name.lower()}", c_fragment, **given, c=c_fragment)
    np.testing.assert_array_equal(found, (a @ b + c)[places_c()].astype(np.float32))


def of_collectives() -> Iterator[tuple[str, Array]]:
    """Names and what each of 96 threads, which hold 0 to 95, gets; in the order of the kernel."""
    x = np.arange(96)
    lane, warp = x % 32, x // 32 * 32
    yield "__shfl_sync", warp + lane // 2
    yield "__shfl_sync of 64 bits", (lambda other: other << 32 | other + 1000)(warp + 31 - lane)
    yield "__shfl_xor_sync", x ^ 5
    yield "__shfl_xor_sync of float", ((x ^ 16) + 0.5).astype(np.float32).view(np.int32)
    yield "__shfl_xor_sync of double", ((x ^ 1) / 3.0).view(np.int64)
    yield "__shfl_up_sync", np.where(lane >= 3, x - 3, x)
    yield "__shfl_down_sync within 8", np.where(lane % 8 < 5, x + 3, x)
    yield "__ballot_sync", np.full(96, 0xAAAAAAAA)
    yield "__any_sync", np.where(warp == 0, 1, 0)
    yield "__all_sync", np.where(warp == 32, 0, 1)
    yield "__syncthreads_count", np.full(96, 32)
    yield "__syncthreads_or", np.full(96, 1)
    yield "__syncthreads_and", np.full(96, 0)
    yield "__shfl_sync of half a warp", np.where(lane < 16, warp + 15, 0)
    yield "__syncwarp", x ^ 31
    yield "__syncthreads", 95 - x
    yield "atomicAdd, old value", 2 * x
    yield "atomicAdd, sum", 10 + np.bincount(x % 5, x)[x % 5].astype(int) + 2 * x + 3
    products = [i * 0x9E3779B9 % 2**32 for i in range(96)]
    yield "__popc", np.array([product.bit_count() for product in products])
    yield "__ffs", np.array([(product & -product).bit_length() for product in products])


COLLECTIVES = dict(of_collectives())


def collective(backend: Backend, name: str) -> None:
    out = np.zeros((len(COLLECTIVES), 96), np.int64)
    found = backend.run("collectives", out, values=np.arange(96, dtype=np.int32))
    np.testing.assert_array_equal(found[list(COLLECTIVES).index(name)], COLLECTIVES[name])


CASES: dict[str, Callable[[Backend], None]] = {
    "opaque": opaque,
    "exp2_fast": exp2_fast,
    "expf": partial(library_function, name="expf", exact_function=np.exp),
    "logf": partial(library_function, name="logf", exact_function=np.log),
    "tanhf": partial(library_function, name="tanhf", exact_function=np.tanh),
    "fmaxf": fmaxf,
    "fmaf": fmaf,
    "__fdividef": fdividef,
    **{f"pack<{name}>": partial(pack, name=name) for name in FLOATS},
    **{f"unpack<{name}>": partial(unpack, name=name) for name in FLOATS},
    "store_16": store_16,
    "copy_async_16": copy_async_16,
    **{f"copy_async_wait<{newest}>": partial(copy_async_wait, newest=newest) for newest in range(3)},
    **{f"shared_address of {size}": partial(shared_address, size=size) for size in (1024, 40 * 1024, 96 * 1024)},
}
for order, rows in (("in order", LANE), ("permuted", LANE * 13 % 32), ("repeated", LANE * 5 % 7)):
    for suffix in ("", "_transposed"):
        CASES[f"load_matrix_x4{suffix} {order}"] = partial(load_matrix, transposed=bool(suffix), rows=rows)
for dtype in FLOATS:
    for part in ("left half of a", "right half of a", "b", "c", "product", "sum"):
        CASES[f"mma_16x8x16<{dtype}> {part}"] = partial(mma, name=dtype, case=part)
for label in COLLECTIVES:
    CASES[label] = partial(collective, name=label)


@pytest.mark.parametrize("case", CASES)
def test_primitive(backend: Backend, case: str) -> None:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        CASES[case](backend)


@pytest.mark.parametrize("case", CASES)
def test_a_small_error_is_noticed(case: str) -> None:
    broken = Emulated(defines=("BREAK_PRIMITIVES",))
    with pytest.raises((AssertionError, EmulatorError)), np.errstate(all="ignore"):
        CASES[case](broken)


def test_no_primitive_of_the_kernels_is_left_out() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*/*.cu*")}
    sources.pop("platform.cuh")
    instructions = sources.pop("ptx.cuh") + sources.pop("hopper.cuh")
    used = set(re.findall(r"^ *GISTKIT_DEVICE (?:static )?\w+ (\w+)\(", instructions, re.MULTILINE))
    assert {"load_matrix_x4", "tensor_load", "register_a"} <= used
    for text in sources.values():
        # Names that end in underscores too are attributes, builtins the compiler's.
        used |= set(re.findall(r"\b(__(?!builtin)\w*[a-z]|atomic[A-Z]\w+)\(", text))
    assert "__shfl_sync" in used
    tested = "".join((ROOT / source).read_text() for source in SOURCES)
    assert not [name for name in used if not re.search(rf"\b{name}\b", tested)]
