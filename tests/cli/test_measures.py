"""On the command line: the perplexity of words."""

import json

import pytest

from tests.cli.test_cli import folder, run  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_words_of_continuations(run, tmp_path):  # noqa: F811
    book, out = tmp_path / "book.txt", tmp_path / "report.json"
    book.write_text(" ".join(f"it rained <unk> {number} times ," for number in range(120)))
    words = ("--text", book, "--context", 20, "--continuation", 60, "--examples", 2, "--out", out, "--tasks", "lm")
    status, shown, _ = run("evaluate", *words, "--baselines", "full", "--excluded-words", "<unk>")
    assert status == 0 and "LM word PPL" in shown
    counts = json.loads(out.read_text())["rows"][0]["counts"]
    assert counts["lm_excluded_words"] > 1 and counts["lm_words"] > 9
