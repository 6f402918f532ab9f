"""The suite itself: it says what it skips and why, and every test has its place in the Makefile."""

import re
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.isas import BEYOND, ISAS, best_isas

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
# By its path: folders have a conftest of their own.
mark_slow = runpy.run_path(str(ROOT / "conftest.py"))["pytest_collection_modifyitems"]
SKIPS = """
import pytest

@pytest.mark.parametrize("case", range(2))
def test_that_is_skipped(case):
    pytest.skip("there is no such thing")
"""


@pytest.mark.slow
def test_what_was_skipped_is_a_line_a_reason(tmp_path):
    (tmp_path / "test_skips.py").write_text(SKIPS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "test_skips.py"], capture_output=True, text=True, check=False)
    told = re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE)
    assert len(told) == 1 and re.fullmatch(r"SKIPPED \[2\] .*test_skips.py:6: there is no such thing", told[0]), told


def test_each_test_runs_in_make_check_or_at_night_and_quick_ones_in_make_test():
    chosen = dict(
        re.findall(r"^([\w-]+):.*\n\t\$\(PYTEST\) -m (\".*?\"|\w+) .*(?:TESTS|tests)", MAKEFILE, re.MULTILINE)
    )
    assert chosen.keys() == {"test", "check-tests", "nightly-tests"}
    for slow, nightly in product((False, True), repeat=2):
        has = {"slow": slow, "nightly": nightly}
        places = {target for target, expression in chosen.items() if eval(expression.strip('"'), has)}
        expected = {"nightly-tests"} if nightly else {"check-tests"} if slow else {"check-tests", "test"}
        assert places == expected, has


def words(variable):
    """What the Makefile sets a variable to."""
    return re.search(rf"^{variable} := ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)[1].replace("\\\n", " ").split()


def test_what_the_makefile_names_is_there_and_no_tier_is_empty():
    ignored = [f"tests/compress/test_{name}.py" for name in words("OWN_ARITHMETIC")]
    named = [*ignored, *words("OLDEST_TESTS"), *words("AVX2_TESTS"), *words("TESTS")]
    assert len(ignored) > 9 and [name for name in named if not (ROOT / name).exists()] == []
    for folder, mark in (("tests", "slow"), ("tests", "nightly"), ("apps/vllm/tests", "nightly")):
        files = (ROOT / folder).rglob("test_*.py")
        assert any(f"pytest.mark.{mark}" in file.read_text() for file in files), (folder, mark)


@pytest.mark.parametrize("name", ["isa", "attention_isa"])
def test_other_instruction_sets_wait_for_make_check(name):
    for isa in {*ISAS, *BEYOND}:
        marks = []
        item = SimpleNamespace(
            callspec=SimpleNamespace(params={name: isa}), path=Path("tests/ops/test.py"), add_marker=marks.append
        )
        mark_slow([item])
        assert marks == ([] if isa in best_isas() else ["slow"])
