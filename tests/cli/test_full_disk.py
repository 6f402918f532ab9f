"""Every command that writes, where no file may grow: one line, nothing half written, and what was there as it was."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from transformers import AutoModelForCausalLM

from gistkit import cli
from gistkit.options.models import new_compressor
from tests.cli.test_cli import TEXT, small_llama
from tests.helpers.disks import limit
from tests.helpers.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "retrieval-short.jsonl"
SMALL = ["--batch", "2", "--min-length", "40", "--max-length", "40", "--chunk", "20", "--lora", "2", "--losses", "ae"]
STUDY = ["study", "pooling", "--quick", "--steps", "2", "--batch", "2", "--lengths", "8", "--inputs", "sphere"]
COMMANDS = {
    "compress": ["compress", "text.txt", "-o", "OUT/text.gist", "--model", "model"],
    "view layout": ["view", "layout", "gistpool", "--context", "8", "--ratio", "4", "-o", "OUT/view.html"],
    "view attention": ["view", "attention", "--text", "text.txt", "--model", "model", "-o", "OUT/view.html"],
    "view results": ["view", "results", str(RESULTS), "--out", "OUT"],
    "nuggets": ["nuggets", "text.txt", "-o", "OUT/view.html", "--model", "model", "--compressor", "dodo"],
    "nuggets, a picture": ["nuggets", "text.txt", "-o", "OUT/view.png", "--model", "model", "--compressor", "dodo"],
    "evaluate": ["evaluate", "--model", "model", "--text", "text.txt", "--examples", "2", "--max-new-tokens", "2",
                 "--chunk", "20", "--context", "20", "--continuation", "8", "--baselines", "", "--out", "OUT/a.json"],
    "train": ["train", "--model", "model", "--text", "text.txt", "--out", "OUT", "--device", "cpu", "--steps", "2",
              "--held-out", "2", *SMALL],
    "study": [*STUDY, "--heads", "1/1", "--contexts", "fixed", "--out", "OUT"],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a Dodo around it and a text."""
    root = tmp_path_factory.mktemp("place")
    small_llama().save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    new_compressor(model, "dodo", ratio=4, layer=1, lora=2).save_pretrained(root / "dodo")
    (root / "text.txt").write_text(" ".join(f"{TEXT}{number}" for number in range(9)))
    return root


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_told_in_one_line(name, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    out = tmp_path / "out"
    words = [word.replace("OUT", str(out)) for word in COMMANDS[name]]
    out.mkdir()
    with limit(60):
        assert cli.main(words) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        rf"gistkit: {re.escape(str(out))}/\S+: expected [\d.,]+ \w+ of space to write it, got [^(]* free", told
    )
    left = {path: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    # Only the metrics begin, with no line.
    assert set(left) <= {out / "metrics.jsonl"} and not any(left.values())


@pytest.mark.parametrize("name", ["compress", "view layout", "nuggets", "nuggets, a picture", "evaluate"])
def test_a_full_disk_leaves_the_old_file(name, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = [word.replace("OUT", str(tmp_path)) for word in COMMANDS[name]]
    path = next(Path(word) for word in words if word.startswith(str(tmp_path)))
    path.write_text("old")
    with limit(60):
        assert cli.main(words) == 2
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {path.name: "old"}
