"""Every command that writes, where no file may grow: one line, nothing half written, and what was there as it was."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit import cli
from tests.cli.test_cli import TEXT, saved
from tests.helpers.disks import limit

pytestmark = pytest.mark.usefixtures("one_thread")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "retrieval-short.jsonl"
SMALL = ["--batch", "2", "--min-length", "40", "--max-length", "40", "--chunk", "20", "--lora", "2", "--losses", "ae"]
STUDY = ["study", "pooling", "--quick", "--steps", "2", "--batch", "2", "--lengths", "8", "--inputs", "sphere"]
COMMANDS = {
    "compress": ["compress", "text.txt", "-o", "OUT/text.gist", "--model", "model"],
    "view layout": ["view", "layout", "gistpool", "--context", "8", "--ratio", "4", "-o", "OUT/view.html"],
    "view attention": ["view", "attention", "--text", "text.txt", "--model", "model", "--method", "gistpool",
                       "-o", "OUT/view.html"],
    "view results": ["view", "results", str(RESULTS), "--out", "OUT"],
    "evaluate": ["evaluate", "--model", "model", "--text", "text.txt", "--examples", "2", "--max-new-tokens", "2",
                 "--chunk", "20", "--context", "20", "--continuation", "8", "--baselines", "", "--out", "OUT/a.json"],
    "train": ["train", "--model", "model", "--text", "text.txt", "--out", "OUT", "--device", "cpu", "--steps", "2",
              "--held-out", "2", *SMALL],
    "study": [*STUDY, "--heads", "1/1", "--contexts", "fixed", "--out", "OUT"],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a text."""
    root = tmp_path_factory.mktemp("place")
    saved(root / "model")
    (root / "text.txt").write_text(" ".join(f"{TEXT}{number}" for number in range(9)))
    return root


# One that writes a file and one that writes into a folder are quick.
@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("compress", False),
        ("compress", True),
        ("train", False),
        *(
            pytest.param(name, any(word.startswith("OUT/") for word in words), marks=pytest.mark.slow)
            for name, words in COMMANDS.items()
            if name not in ("compress", "train")
        ),
    ],
)
def test_a_full_disk_is_told_in_one_line_and_leaves_the_old_file(name, old, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    out = tmp_path / "out"
    words = [word.replace("OUT", str(out)) for word in COMMANDS[name]]
    out.mkdir()
    before = {Path(word): b"old" for word in words if old and word.startswith(f"{out}/")}
    for path, content in before.items():
        path.write_bytes(content)
    with limit(60):
        assert cli.main(words) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        rf"gistkit: {re.escape(str(out))}/\S+: expected [\d.,]+ \w+ of space to write it, got [^(]* free", told
    )
    left = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    # Only the metrics begin, with no line.
    assert left == before or left == {out / "metrics.jsonl": b""}
    assert len(before) == old
