"""The CUDA library as a whole, on a CPU: door, dispatcher, autograd and glue in front of emulated kernels."""

from __future__ import annotations

import functools
import json
from typing import Any

import glue
import pytest

# All kernels and their glue are compiled for it.
pytestmark = pytest.mark.slow

LISTS = {"normalize_spans", "key_lists", "order_lists", "query_lists"}


@functools.cache
def everything() -> dict[str, dict[str, Any]]:
    """From one process, which costs more than what it finds."""
    return json.loads(glue.run("import glue_cases; glue_cases.show()").splitlines()[-1])


def found(what: str) -> dict[str, Any]:
    return everything()[what]


def launches(calls: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix("launch "): count for name, count in calls.items() if name.startswith("launch ")}


def questions(calls: dict[str, int]) -> dict[str, int]:
    """Calls of the runtime; which device is the current one costs nothing."""
    return {name: n for name, n in calls.items() if name.startswith("call ") and name != "call cudaGetDevice"}


def test_results_and_gradients() -> None:
    wrong = {name: shares for name, shares in found("parity").items() if not all(share <= 1 for share in shares)}
    assert not wrong and len(found("parity")) >= 19


def test_no_lists_of_other_spans() -> None:
    for name, errors in found("other_spans").items():
        assert all(error < 0.15 for error in errors), (name, errors)


def test_lists_beyond_the_bounds_are_made_on_the_host() -> None:
    found_plans = found("on_the_host")
    assert len(found_plans) == 6
    for name, case in found_plans.items():
        assert all(error < 1e-4 for error in case["errors"]), (name, case["errors"])
        assert case["kept"] and not LISTS & set(case["launches"]), name
    assert any(case["launches"] for case in found_plans.values())


def test_bounds_of_lists_that_the_device_makes() -> None:
    cases = found("bounds")
    for name in ("tiles", "lists"):
        assert cases[f"{name} at"]["device"] and not cases[f"{name} at"]["refused"]
        assert not cases[f"{name} beyond"]["device"] and "Plan.to" in cases[f"{name} beyond"]["refused"]
    # Without gradients there are lists of queries only.
    assert cases["lists beyond"]["forward"] and not cases["tiles beyond"]["forward"]
    # In both directions, the grid; beyond, 4 numbers a list, two entries at most, and room for one more list.
    assert cases["tiles at"]["bytes"] >= 2 * 4 * 2**24
    assert cases["tiles beyond"]["bytes"] <= 2 * 4 * (4 * 4097 + 2 * 4097 + 4097)


def test_a_graph_holds_no_lists_that_a_call_may_replace() -> None:
    assert found("captured") == {"brought": [True, True, True], "made": [False, False, True]}


def test_torch_compile() -> None:
    assert found("compiled") == {"lists": 0.0, "none": 0.0}


def test_nothing_waits() -> None:
    assert not {name: case["waits"] for name, case in found("counts").items() if case["waits"]}
    for case in found("counts").values():
        for part in ("first forward", "second forward", "first backward", "second backward", "no grad"):
            assert not any("Synchronize" in name or name == "call cudaMemcpy" for name in case[part])


def test_attributes_are_asked_once() -> None:
    for name, case in found("counts").items():
        for part in ("second forward", "second backward"):
            assert not questions(case[part]), (name, part)
    assert any(questions(case["first forward"]) for case in found("counts").values())


def test_launches() -> None:
    """A kernel for what an op does, and for attention's lists none, but where a plan has none yet."""
    expected = {
        "attention": (
            {"attention_forward", "attention_forward_pairwise"},
            {
                "attention_row_values",
                "attention_query_gradient",
                "attention_key_gradient",
                "attention_backward_pairwise",
            },
        ),
        "rope": ({"rope"}, {"rope"}),
        "window_pool": ({"window_pool"}, {"window_pool"}),
    }
    for name, case in found("counts").items():
        op, dtype, *_ = f"{name} ".split(" ")
        if dtype not in ("bfloat16", "float16"):
            continue
        for part, names in zip(("second forward", "second backward"), expected[op], strict=True):
            assert {n.removesuffix("_kernel") for n in launches(case[part])} == names, (name, part)
            assert all(count == 1 for count in launches(case[part]).values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lists_are_made_once_a_plan(dtype: str) -> None:
    case = found("counts")[f"attention {dtype} without lists"]
    assert launches(case["first forward"]).keys() >= LISTS
    for part in ("first backward", "second forward", "second backward", "no grad"):
        assert not launches(case[part]).keys() & LISTS
    for part in ("first forward", "first backward"):
        assert not launches(found("counts")[f"attention {dtype} ragged"][part]).keys() & LISTS


def test_gradients_by_wgmma() -> None:
    """Where a GPU has it and the problem has the rows; tiles are listed for it in each call, and nothing waits."""
    cases = json.loads(glue.run("import glue_cases; glue_cases.show_wgmma()").splitlines()[-1])
    by_wgmma = {"attention_hopper_backward", "attention_hopper_query_gradients", "positions", *LISTS} - {
        "normalize_spans"
    }
    for name, case in cases.items():
        assert launches(case["calls"]).keys() & by_wgmma == (set() if name == "few" else by_wgmma), name
        assert all(count == 1 for count in launches(case["calls"]).values()), name
        assert not any("Synchronize" in call for call in case["calls"]), name
        assert max(case["errors"]) < 0.01, name
