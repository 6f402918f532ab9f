"""`gistkit evaluate --against presses`: rows, tables and a picture; and what is said where the lab is missing."""

import json

import pytest

from gistkit.compress.scores import SCORES
from gistkit_lab.cli import against
from gistkit_lab.presses import Comparison
from gistkit_lab.presses.comparison import RATIOS
from tests.cli.test_cli import TEXT, folder, run  # noqa: F401 - fixtures

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_evaluate_against_presses_writes_rows_tables_and_a_picture_and_goes_on(run, tmp_path):  # noqa: F811
    assert tuple(SCORES) == against.SCORES and against.RATIOS == RATIOS
    questions, book, out = tmp_path / "doors.jsonl", tmp_path / "book.txt", tmp_path / "out" / "found.jsonl"
    rows = [{"context": TEXT, "question": f"Which is {n}?", "answers": [str(n)]} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    book.write_text(" ".join(f"{TEXT}{number}." for number in range(400)))
    words = ("--against", "presses", "--questions", questions, "--examples", 2, "--max-new-tokens", 2, "--out", out)
    status, shown, complaints = run("evaluate", *words, "--ratios", 2, "--by", "even")
    found = Comparison.load(out)
    assert status == 0 and found.sets == ["doors"] * 2, complaints
    memories = ["full context", "no context", "even", "newest tokens", "oldest tokens", "AvgPool, untrained"]
    assert [one.entry.memory for one in found.outcomes] == memories
    assert "| even 2x " in shown and "| even 2x " in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes()[1:4] == b"PNG"
    # Another ratio and score are added; other questions are not mixed with these.
    assert run("evaluate", *words, "--ratios", "2,4", "--by", "even", "--shares", "equal,all")[0] == 0
    again = Comparison.load(out)
    added = [(one.entry.ratio, one.entry.shares) for one in again.outcomes[6:]]
    assert again.outcomes[:6] == found.outcomes
    assert added == [(2, "all"), (4, "equal"), (4, "all"), (4, "equal"), (4, "equal"), (4, "equal")]
    shown = run("evaluate", *words, "--ratios", "2", "--by", "even", "--fit")[1]
    assert "| even 2x, fitted " in shown and Comparison.load(out).outcomes[-1].entry.fit
    status, _, complaints = run("evaluate", *words, "--text", book, "--context", 300)
    told = f"gistkit: --out: {out}: done: expected a comparison of the same"
    assert status == 2 and complaints.splitlines()[-1].startswith(told)
    # Facts in passages of a text, of the plain model alone.
    words = ("--against", "presses", "--text", book, "--context", 300, "--examples", 2, "--max-new-tokens", 2)
    assert run("evaluate", *words, "--ratios", 8, "--by", "random", "--out", tmp_path / "facts.jsonl")[0] == 0
    assert "not in the text" in Comparison.load(tmp_path / "facts.jsonl").sets
    # A text without a test split has none to take facts from.
    assert "split" in run("evaluate", *words, "--split", "test", "--by", "random", "--out", tmp_path / "test.jsonl")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "kvzip"], "--by: expected none without --against, got ['kvzip']"),
        (["--against", "presses", "--tau", "4"], "--tau: expected none with --against, got 4"),
        (["--against", "presses", "--batch-size", "4"], "--batch-size: expected none with --against, got 4"),
        (["--against", "presses", "--split", "train"], "--split: expected validation or test of a text, got train"),
        (
            ["--against", "presses", "--questions", __file__, "--continuation", "9"],
            "--continuation: not allowed with --questions alone, got 9",
        ),
        (["--against", "presses", "--judge-model", "x"], "--judge-model: expected none with --against, got x"),
    ],
)
def test_options_that_do_not_go_together_are_named(words, message, run):  # noqa: F811
    assert run("evaluate", *words)[::2] == (2, f"gistkit: {message}\n")
