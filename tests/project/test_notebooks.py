"""The notebooks as they are committed: with outputs of one run each, and nothing of the machine in them.

Whether they run is nbmake's to say: make test.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a browser or a code host still shows at once.
LARGEST = 700 * 1024


def text(part):
    return part if isinstance(part, str) else "".join(part)


def source(cell):
    return text(cell["source"])


def cells(path, kind=None):
    every = json.loads(path.read_text())["cells"]
    return [cell for cell in every if kind in (None, cell["cell_type"])]


def test_what_names_a_notebook_names_one_that_is_there():
    written = {path: path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]}
    written |= {path: "\n".join(map(source, cells(path, "markdown"))) for path in PATHS}
    for path, words in written.items():
        unknown = set(re.findall(r"\b0\d_[a-z_]+\b", words)) - {one.stem for one in PATHS}
        assert not unknown, path.name


def test_the_speeds_shown_are_of_the_committed_suites():
    commits = set()
    for path in (ROOT / "benchmarks" / "results").glob("*/suites.json"):
        commits |= {suite["machine"]["commit"] for suite in json.loads(path.read_text()).values()}
    outputs = [output for cell in cells(ROOT / "notebooks" / "07_speed.ipynb", "code") for output in cell["outputs"]]
    named = set(re.findall(r"\b([0-9a-f]{10}) \(", "".join(text(output.get("text", "")) for output in outputs)))
    assert named and named <= commits, "run: make notebooks ARGS=notebooks/07_speed.ipynb"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_one_run_left_it(path):
    code = cells(path, "code")
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run: python notebooks/execute.py"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"
    assert not any(output["output_type"] == "error" for output in outputs)
    shown = [text(output.get("text", "")) + text(output.get("data", {}).get("text/plain", "")) for output in outputs]
    for words in shown:
        assert not re.search(r"Warning\b|Traceback|/home/|/tmp/|site-packages", words) and str(ROOT) not in words, words
        assert len(re.findall(r"\d+/\d+ \[", words)) <= 1, "more than the last line of a progress bar"
    assert path.stat().st_size <= LARGEST
