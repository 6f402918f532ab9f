"""The tensor-core backward kernels of attention on a CPU: what is left beside the contract of all kernels."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_cases import Backward, Case
from attention_kernels import AMPERE, backward, check_backward, library
from emulation import SHARED_LIMIT, EmulatorError, statistics
from test_attention_contract import of

pytestmark = pytest.mark.usefixtures("build")

BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["float16", "96", "128", "128 causal", "192-128", "192-128 group"])
def test_99_kb_of_shared_memory(name: str) -> None:
    """As much as sm_86, sm_89 and sm_120 have."""
    check_backward(of(name, AMPERE), shared_limit=99 * 1024)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_too_little_shared_memory() -> None:
    with pytest.raises(EmulatorError, match="attention_backward returned cudaError_t 1"):
        backward(of("256", AMPERE), shared_limit=99 * 1024)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("limit", [SHARED_LIMIT, 163 * 1024])
@pytest.mark.parametrize("name", ["128", "192-128 group", "256"])
def test_shared_memory_is_what_is_said(name: str, limit: int) -> None:
    case, params = of(name, AMPERE), Backward()
    case.fill(params)
    needed = library("backward", AMPERE).function("gistkit::cuda::attention_backward_shared_bytes")(
        ctypes.c_void_p(ctypes.addressof(params)), limit
    )
    assert needed <= limit
    check_backward(case, shared_limit=needed)


@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("dim", [96, 128])
def test_operands_of_query_gradients_serve_two_products(dim: int) -> None:
    """Counts matrices of 8x8 read from shared memory, four a load, for 64 more keys that 128 queries see in full.

    In a pass over 16 dims each of the 8 warps of queries loads keys twice, values once (two loads for 32 keys) and two
    bands of queries and gradients; each of the 4 warps of keys, for 64 queries, two bands of its own and 4 + 4 others.
    """
    counts = []
    for keys in (64, 128):
        case = Case(128, keys, kind="full", batch=1, heads=1, dim=dim, **BF16)
        statistics()
        backward(case)
        found = statistics()
        assert found.conflicting_loads == 0
        counts.append(found.matrix_loads)
    by_query, by_key = 8 * (3 * 2 + 2 * 2), 2 * 4 * (2 + 4 + 4)
    assert counts[1] - counts[0] == dim // 16 * 4 * (by_query + by_key)
