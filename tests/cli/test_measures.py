"""On the command line: the perplexity of words, and training on several sets."""

import json

import pytest

from tests.cli.test_cli import folder, one_line, run  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"context": f"The {n}. It rained.", "question": "Which?", "answers": [str(n)]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_words_of_continuations(run, tmp_path):  # noqa: F811
    book, out = tmp_path / "book.txt", tmp_path / "report.json"
    book.write_text(" ".join(f"it rained <unk> {number} times ," for number in range(120)))
    words = ("--text", book, "--context", 20, "--continuation", 60, "--examples", 2, "--out", out, "--tasks", "lm")
    status, shown, _ = run("evaluate", *words, "--baselines", "full", "--excluded-words", "<unk>")
    assert status == 0 and "LM word PPL" in shown
    counts = json.loads(out.read_text())["rows"][0]["counts"]
    assert counts["lm_excluded_words"] > 1 and counts["lm_words"] > 9
    words = (*words[:-2], "--tau", 8, "--segment", 8, "--method", "avgpool", "--ratio", 4)
    words += ("--excluded-words", "<unk>,it")
    status, shown, complaints = run("evaluate", *words)
    assert status == 0 and "LM word PPL" in shown, complaints
    assert json.loads(out.read_text())["rows"][0]["counts"]["lm_excluded_words"] > counts["lm_excluded_words"]


@pytest.mark.slow
def test_training_on_a_mixture(run, questions, tmp_path):  # noqa: F811
    other, out = tmp_path / "other.jsonl", tmp_path / "run"
    other.write_text(questions.read_text().replace("Which", "What"))
    words = ("--questions", questions, other, "--preset", "epl-finetune", "--out", out, "--device", "cpu")
    size = ("--batch", 4, "--warmup", 0, "--chunk", 20, "--ratio", 5, "--lora", 2)
    status, shown, complaints = run("train", *words, *size, "--steps", 2, "--weights", "3,1")
    assert status == 0 and "2 steps, " in shown, complaints
    assert run("train", *words, *size, "--steps", 3, "--weights", "3,1", "--resume")[0] == 0
    # Other shares are another run.
    status, _, complaints = run("train", *words, *size, "--steps", 4, "--weights", "1,1", "--resume")
    assert status == 2 and "batches" in complaints
    status, _, complaints = run("train", *words, *size, "--weights", "1,2,3")
    assert status == 2
    assert one_line(complaints.splitlines()[-1:], "weights: expected one for each of several sets of questions, got 3")
