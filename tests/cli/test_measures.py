"""Measures on the command line: a judge, perplexity of words, and the matrix of several sets."""

import json

import pytest

from gistkit import cli
from tests.cli.test_cli import folder, one_line, run  # noqa: F401 - fixtures
from tests.evaluate.test_judge import KEY, RIGHT, Server, in_turn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"context": f"The {n}. It rained.", "question": "Which?", "answers": [str(n)]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_endpoint_judges_and_reports_become_a_matrix(run, questions, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("GISTKIT_JUDGE_KEY", KEY)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{question}/{reference}/{answer}")
    bad = (400, {}, "too long")
    # The first reply is to the trial, and the first answer has none.
    answer = lambda number, body: bad if "/0/" in body["messages"][0]["content"] else RIGHT  # noqa: E731
    out = tmp_path / "a-b.json"
    words = ("--questions", questions, "--baselines", "", "--max-new-tokens", 3, "--method", "icae", "--out", out)
    with Server(answer) as server:
        judge = ("--judge", server.url, "--judge-model", "grader", "--judge-prompt", prompt, "--judge-concurrency", 2)
        status, shown, complaints = run("evaluate", *words, *judge, "--trained-on", "a", "--tested-on", "b")
    assert status == 0 and "QA judge" in shown, complaints
    assert "the judge gave 1 of 3 answers of ICAE EPL 5x no score" in complaints
    assert [headers["Authorization"] for _, headers, _ in server.requests] == [f"Bearer {KEY}"] * 4
    written = out.read_text()
    assert KEY not in written + shown + complaints
    report = json.loads(written)
    assert report["settings"]["judge"]["model"] == "grader"
    assert report["rows"][0]["counts"]["qa_judged"] == 2 and report["rows"][0]["metrics"]["qa_judge"] == 100
    assert (report["settings"]["trained_on"], report["settings"]["tested_on"]) == ("a", "b")

    assert cli.main(["view", "matrix", str(out)]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "| QA loss: trained on | b     |"
    assert row == f"| a                   | {report['rows'][0]['metrics']['qa_loss']:.3f} |"
    assert cli.main(["view", "matrix", "--metric", "qa_exact_match", str(out), str(out)]) == 2
    assert "expected one report trained on a and tested on b" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_without_a_score_are_told_of_each_of_several_sets(run, questions, tmp_path):  # noqa: F811
    other = tmp_path / "other.jsonl"
    other.write_text("".join(questions.read_text().replace("The", "Our").splitlines(keepends=True)[:2]))
    prompt, out = tmp_path / "prompt.txt", tmp_path / "report.json"
    prompt.write_text("{question}/{reference}/{answer}")
    bad = (400, {}, "too long")
    # Each set has an answer 0.
    answer = lambda number, body: bad if "/0/" in body["messages"][0]["content"] else RIGHT  # noqa: E731
    words = ("--questions", questions, other, "--baselines", "", "--max-new-tokens", 3, "--method", "icae")
    with Server(answer) as server:
        judge = ("--judge", server.url, "--judge-model", "grader", "--judge-prompt", prompt, "--out", out)
        status, shown, complaints = run("evaluate", *words, *judge)
    assert status == 0 and "mean of 2 sets" in shown, complaints
    for name, count in (("questions", 3), ("other", 2)):
        assert f"the judge gave 1 of {count} answers to {name} of ICAE EPL 5x no score" in complaints
    counts = {each["name"]: each["rows"][0]["counts"] for each in json.loads(out.read_text())["sets"]}
    assert {name: each["qa_judged"] for name, each in counts.items()} == {"questions": 2, "other": 1}


def test_a_judge_that_cannot_answer_is_known_before_the_evaluation(run, questions, tmp_path):  # noqa: F811
    out = tmp_path / "report.json"
    with Server(in_turn((404, {}, "no such model"))) as server:
        words = ("--questions", questions, "--judge", server.url, "--judge-model", "grader", "--out", out)
        status, shown, complaints = run("evaluate", *words)
    assert status == 2 and not shown and not out.exists()
    assert one_line(complaints.splitlines(), "judge: expected a score from grader at http://127.0.0.1")
    assert "no such model" in complaints and len(server.requests) == 1


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judge", "http://localhost:1/v1"], "--judge-model: expected the model's name with --judge, got none"),
        (["--judge-model", "x"], "--judge-model: not allowed without --judge, got x"),
        (["--judge", "ftp://x", "--judge-model", "x"], "url: expected an address such as http://localhost:8000/v1"),
        (["--documents"], "--documents: not allowed without --text"),
        (["--documents", "--text", "x", "--cloze"], "--cloze: not allowed with --documents, got True"),
        (["--tau", "4", "--judge", "x"], "--judge: not allowed with --tau, got x"),
    ],
)
def test_mistakes_are_told_in_a_line(run, words, message):  # noqa: F811
    status, shown, complaints = run("evaluate", *words)
    assert status == 2 and not shown and one_line(complaints.splitlines(), message)


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
