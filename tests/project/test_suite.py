"""The suite itself: it runs beside what a demo left, says what it skips and why, and leaves no test without a tier."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import best_isas

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# What the collection hands over, with the markers of each test and the instruction set that it asks for.
PLUGIN = """
def pytest_collection_finish(session):
    for item in session.items:
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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The repository by links, as `make demo` leaves it: with the study's results in runs/epl."""
    folder = tmp_path_factory.mktemp("suite") / "checkout"
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("tests", "runs", ".git", "build"):
            (folder / path.name).symlink_to(path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", folder / "tests", copy_function=os.symlink, ignore=ignored)
    (folder / "tests" / "test_skips.py").write_text(SKIPS)
    (folder / "runs" / "epl").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/results/epl.jsonl", folder / "runs/epl/results.jsonl")
    return folder


def run(checkout, *words, seconds):
    """What a run of tests there prints; more than `seconds` of a process are too many, on however busy a machine."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(checkout.parent)
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{' '.join(command)} took more than {seconds} s, and had said {error.stdout!r}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_beside_a_demos_results_passes_and_says_what_was_skipped_and_why(checkout):
    refused = "tests/studies/test_epl.py::test_a_text_too_short_for_a_chunk_is_refused"
    shown = run(checkout, refused, "tests/test_skips.py", seconds=900)
    assert re.search(r"^1 passed, 2 skipped", shown, re.MULTILINE), shown
    assert re.findall(r"^SKIPPED .*", shown, re.MULTILINE) == ["SKIPPED [2] tests/test_skips.py:5: there is no such thing"]


def test_each_test_is_in_one_of_the_tiers_of_make_and_other_instruction_sets_wait_for_make_check(checkout):
    (checkout.parent / "markers.py").write_text(PLUGIN)
    shown = run(checkout, "-p", "markers", "--collect-only", "-q", "tests", seconds=1800)
    items = [line.split(" ")[1:] for line in shown.splitlines() if line.startswith("ITEM ")]
    makefile, tiers = (ROOT / "Makefile").read_text(), {}
    for target in ("test", "check", "nightly"):
        (tiers[target],) = re.findall(rf"^{target}:.*\n(?:\t.*\n)*?\t\$\(PYTEST\) -m (?:\"(.*?)\"|(\w+))", makefile, re.MULTILINE)
    tiers = {target: "".join(found) for target, found in tiers.items()}
    counts = dict.fromkeys(tiers, 0)
    for name, isa, *marks in items:
        has = {mark: mark in marks for mark in ("slow", "nightly")}
        (tier,) = (target for target, expression in tiers.items() if eval(expression, has))
        counts[tier] += 1
        assert tier != "test" or isa == "-" or isa in best_isas(), name
    assert min(counts.values()) > 100, counts
