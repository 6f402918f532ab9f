"""The notebooks as they are committed: in order, with outputs of one run each, and nothing of the machine in them.

Whether they run is nbmake's to say: make test.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a browser or a code host still shows at once.
LARGEST = 700 * 1024


def text(part):
    return part if isinstance(part, str) else "".join(part)


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_they_are_numbered_without_gaps():
    assert [path.name[:3] for path in PATHS] == [f"{number:02}_" for number in range(len(PATHS))]


def test_what_names_a_notebook_names_one_that_is_there():
    names = {path.stem for path in PATHS}
    sources = [*PATHS, ROOT / "README.md", *(ROOT / "benchmarks").glob("*.md")]
    for source in sources:
        written = source.read_text() if source not in PATHS else "".join(map(text_of, cells(source, "markdown")))
        for name in re.findall(r"\b0\d_[a-z_]+\b", written):
            assert name in names, f"{source.name} names {name}"


def text_of(cell):
    return text(cell["source"])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_one_run_left_it(path):
    code = cells(path, "code")
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run: python notebooks/execute.py"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"
    assert not any(output["output_type"] == "error" for output in outputs)
    # Pictures and pages are base64 or of the library's own making.
    shown = [text(output.get("text", "")) + text(output.get("data", {}).get("text/plain", "")) for output in outputs]
    for words in shown:
        assert not re.search(r"Warning\b|Traceback|/home/|/tmp/|/work/|site-packages", words), words
        assert words.count("it/s]") + words.count("s/it]") <= 1, "more than the last line of a progress bar"
    assert path.stat().st_size <= LARGEST


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_title_and_ends_with_where_to_go(path):
    every = json.loads(path.read_text())["cells"]
    assert every[0]["cell_type"] == every[-1]["cell_type"] == "markdown"
    first, last = text_of(every[0]), text_of(every[-1])
    assert re.match(r"# \S.*\n\n", first) and "?" in first, "expected a title and a question"
    assert "**Where next.**" in last and len(re.findall(r"`0\d_|`gistkit |`make ", last)) > 1
