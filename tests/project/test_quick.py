"""What `--quick` leaves out: slow tests, browsers, and of other instruction sets all but every eighth case."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.quick import EVERY, HEADER, instruction_set, left_out_whole, quick


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["one process", "xdist"])
def test_a_quick_run_says_at_its_start_what_it_leaves_out(pytestconfig: pytest.Config, options: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--quick", "-k", "browsers", *options, __file__]
    run = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True)
    head, _, rest = run.stdout.partition("1 passed")
    assert rest and HEADER.splitlines()[-1] in head


def kinds(items: list[pytest.Item]) -> set[tuple[str, str | None]]:
    """The tests that are neither slow nor in a browser, with their instruction sets."""
    fast = (one for one in items if not left_out_whole(one))
    return {(one.nodeid.split("[")[0], instruction_set(one)) for one in fast}
