"""What `--quick` leaves out: slow tests, browsers, and of other instruction sets all but every eighth case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.quick import EVERY, instruction_set, quick


def item(name: str, slow: bool = False, fixtures: tuple[str, ...] = (), **params: str) -> Any:
    marker = {"slow": True} if slow else {}
    return SimpleNamespace(
        nodeid=name, callspec=SimpleNamespace(params=params), fixturenames=fixtures, get_closest_marker=marker.get
    )


def test_the_best_instruction_set_runs_in_full_and_the_others_every_eighth_case() -> None:
    items = [item(f"a[{n}-{isa}]", isa=isa) for n in range(EVERY + 1) for isa in ("generic", "avx2", "avx512")]
    items += [item(f"b[{n}-generic]", attention_isa="generic") for n in range(3)]
    chosen, left_out = quick(items, ["avx512", "amx"])
    names = [one.nodeid for one in chosen]
    assert [name for name in names if "avx512" in name] == [f"a[{n}-avx512]" for n in range(EVERY + 1)]
    assert [name for name in names if "avx2" in name] == ["a[0-avx2]", f"a[{EVERY}-avx2]"]
    assert [name for name in names if "generic" in name] == ["a[0-generic]", f"a[{EVERY}-generic]", "b[0-generic]"]
    assert len(chosen) + len(left_out) == len(items)


def test_slow_tests_and_browsers_are_left_out() -> None:
    items = [item("a"), item("b", slow=True), item("c", fixtures=("tmp_path", "chromium"))]
    chosen, left_out = quick(items, ["generic"])
    assert chosen == items[:1] and left_out == items[1:]


def test_every_instruction_set_of_a_test_that_is_not_slow_is_left_with_some(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    assert kinds(quick(items, ["avx2"])[0]) == kinds(items)


def kinds(items: list[pytest.Item]) -> set[tuple[str, str | None]]:
    """The tests that are neither slow nor in a browser, with their instruction sets."""
    fast = [one for one in items if one.get_closest_marker("slow") is None]
    fast = [one for one in fast if "chromium" not in getattr(one, "fixturenames", ())]
    return {(one.nodeid.split("[")[0], instruction_set(one)) for one in fast}
