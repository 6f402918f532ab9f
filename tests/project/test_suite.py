"""The suite itself: it runs beside what a demo left, says what it skips and why, and leaves no test without a tier."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.isas import best_isas

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Prints all that is collected, with the instruction set that a test asks for and its markers, before a part is chosen.
PLUGIN = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        isa = params.get("isa") or params.get("attention_isa") or "-"
        print("ITEM", item.nodeid.replace(" ", "_"), isa, *{mark.name for mark in item.iter_markers()})
"""
SKIPS = """
import pytest

@pytest.mark.parametrize("case", range(2))
def test_that_is_skipped(case):
    pytest.skip("there is no such thing")
"""
REFUSED = "test_a_text_too_short_for_a_chunk_is_refused"
# Longer than on any busy machine, for one test and the collection of all.
SECONDS = 1200


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What a run says in a folder of links to the repository's files, with what `make demo` leaves in runs/epl."""
    folder = tmp_path_factory.mktemp("suite")
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "tests", checkout / "tests", copy_function=os.symlink)
    for path in ROOT.iterdir():
        if path.name not in ("tests", "runs", ".git", "build"):
            (checkout / path.name).symlink_to(path)
    (checkout / "runs" / "epl").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/results/epl.jsonl", checkout / "runs/epl/results.jsonl")
    (checkout / "tests/test_skips.py").write_text(SKIPS)
    (folder / "told.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-p", "told", "-p", "no:cacheprovider", "-s"]
    command += ["tests", "lab/tests", "-k", f"{REFUSED} or is_skipped"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{' '.join(command)} did not end within {SECONDS} s, and had said {error.stdout!r}")
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr
    return done.stdout


def test_it_runs_beside_a_demos_results(shown):
    assert f"::{REFUSED}" in shown and re.search(r"^2 passed, \d+ skipped", shown, re.MULTILINE)


def test_what_was_skipped_is_a_line_a_reason(shown):
    told = re.findall(r"^SKIPPED .*", shown, re.MULTILINE)
    assert "SKIPPED [2] tests/test_skips.py:6: there is no such thing" in told and len(told) == len({*told})


def test_each_test_has_one_tier_and_other_instruction_sets_wait_for_make_check(shown):
    chosen = re.findall(r"\$\(PYTEST\) -m (\".*?\"|\w+) .*tests(?!/)", (ROOT / "Makefile").read_text())
    assert len(chosen) == 3
    counts = dict.fromkeys(chosen, 0)
    for line in re.findall(r"ITEM (.*)", shown):
        name, isa, *marks = line.split(" ")
        has = {mark: mark in marks for mark in ("slow", "nightly")}
        (tier,) = (expression for expression in chosen if eval(expression.strip('"'), has))
        counts[tier] += 1
        assert tier != chosen[0] or isa in ("-", *best_isas()), name
    assert min(counts.values()) > 100, counts
