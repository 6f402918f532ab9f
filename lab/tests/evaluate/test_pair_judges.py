"""Judges of pairs: verdicts in both orders, their shares, and the command over two reports."""

import json
from itertools import product

import pytest
from endpoint import KEY, Server, in_turn, reply

from gistkit import cli
from gistkit.evaluate import Report
from gistkit.evaluate.report import ExampleResult, Row
from gistkit.formats import read_questions
from gistkit_lab.evaluate.judge import JudgeError
from gistkit_lab.evaluate.pairs import OpenAIPairJudge, Pair, compare_answers, compared
from tests.cli.test_cli import folder, one_line, run  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


def verdict(better):
    return 200, {}, reply(json.dumps({"better": better}))


def test_a_request_has_both_answers_and_a_reply_is_read():
    with Server(in_turn(verdict("B"), verdict(" neither "), (200, {}, reply("A, I think")), verdict("a"))) as server:
        judge = OpenAIPairJudge(server.url, "grader", template="{context}|{question}|{first}|{second}", wait=0)
        asked = [judge("Why {first}?", "one", "two", context="text") for _ in range(3)]
    assert asked == [0, 0.5, 1] and len(server.requests) == 4
    assert server.requests[0][2]["messages"][0]["content"] == "text|Why {first}?|one|two"
    with Server(in_turn(verdict("C"))) as server, pytest.raises(JudgeError, match="expected a verdict from grader at"):
        OpenAIPairJudge(server.url, "grader", wait=0, attempts=1)("q", "one", "two")
    with pytest.raises(ValueError, match=r"template: expected \{second\} in it"):
        OpenAIPairJudge("http://localhost:1/v1", "grader", template="{question}{first}")


def test_both_orders_cancel_a_liking_for_a_place():
    pairs = [Pair("q", "good", "bad"), Pair("q", "bad", "good"), Pair("q", "bad", "bad")]
    better = lambda question, first, second: (first == "good") - (second == "good")  # noqa: E731
    assert compared(lambda *texts: 0.5 + better(*texts) / 2, pairs) == [1, 0, 0.5]
    # One that looks at the place alone.
    assert compared(lambda *texts: 1, pairs) == compared(lambda *texts: 0, pairs) == [0.5] * 3
    assert compared(lambda *texts: 1, pairs, both_orders=False) == [1] * 3
    # Who is better in one order and as good in the other wins.
    for one, other in product((0, 0.5, 1), repeat=2):
        scores = {("a", "b"): one, ("b", "a"): other}
        (found,) = compared(lambda question, *order, scores=scores: scores[order], [Pair("q", "a", "b")])
        assert found == {-1: 0, 0: 0.5, 1: 1}[(one > other) - (one < other)]


def test_a_verdict_that_is_missing_in_one_order_is_missing():
    def judge(question, first, second, context):
        if (first, context) == ("b", "2"):
            raise JudgeError("no")
        return float(first == "a")

    judge.reads_context = True
    done = []
    pairs = [Pair("q", "a", "b", number) for number in "123"]
    assert compared(judge, pairs, on_pair=lambda: done.append(1)) == [1, None, 1] and len(done) == 3
    with pytest.raises(ValueError, match="judge: expected a score from 0 to 1, got 'A'"):
        compared(lambda *texts: "A", pairs)


def report(name, outputs, answers=("r",), kept=True):
    results = tuple(ExampleResult(1, 1.0, output=each, prediction=each, answers=answers) for each in outputs)
    return Report((Row("FullContext", {}, {}, 0.0), Row(name, {}, {}, 0.0, results if kept else ())), {
        "methods": {"FullContext": {"class": "FullContext"}, name: {"class": "ICAE"}}})  # fmt: skip


def test_shares_are_of_all_pairs():
    asked = list(read_questions([{"context": f"c{n}", "question": f"q{n}", "answers": ["r"]} for n in range(5)]))
    first, second = report("A", ["x", "x", "y", "z"]), report("B", ["y", "y", "x", "z"])
    seen = []

    def judge(question, one, other):
        seen.append((question, one, other))
        if question == "q1":
            raise JudgeError("no")
        return 0.5 + (one < other) / 2 - (one > other) / 2

    result = compare_answers(first, second, iter(asked), judge)
    (row,) = result.rows
    assert row.method == "A against B" and row.metrics == {"win": 25, "lose": 25, "tie": 25}
    assert row.counts == {"pairs": 4, "judged": 3} and result.settings == {"judge": "judge", "both_orders": True}
    assert seen[:3] == [("q0", "x", "y"), ("q0", "y", "x"), ("q1", "x", "y")]
    assert "| 25.0  | 25.0   | 25.0  |" in result.table()
    for wrong, message in (
        ((first, report("B", ["y"])), r"expected reports of the same examples, kept in them, got \[4, 1\] examples"),
        ((report("A", ["x"], kept=False), report("B", ["y"], kept=False)), r"got \[0, 0\] examples"),
        ((first, report("B", list("abcd"), ("other",))), r"second: expected an answer to rows\[0\], \('r',\), got an"),
        ((first, report("B", [None] * 4)), "second: expected an answer to .* got no answer"),
        ((report("A", list("abcdef")), report("B", list("abcdef"))), "expected the 6 that were answered, got 5"),
        ((Report(first.rows, {}), second), "first: expected one method beside the baselines, got FullContext, A"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_answers(*wrong, iter(asked), judge)


@pytest.mark.slow
def test_two_reports_on_the_command_line(run, tmp_path, monkeypatch, capsys):  # noqa: F811
    questions = tmp_path / "questions.jsonl"
    rows = [{"context": f"The {n}. It rained.", "question": "Which?", "answers": [str(n)]} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--questions", questions, "--baselines", "none", "--max-new-tokens", 3, "--method", "icae", "--chunk", 8)
    made = [tmp_path / f"{ratio}.json" for ratio in (2, 4)]
    for ratio, path in zip((2, 4), made, strict=True):
        assert run("evaluate", *common, "--ratio", ratio, "--keep-examples", "--out", path)[0] == 0
    monkeypatch.setenv("GISTKIT_JUDGE_KEY", KEY)
    out = tmp_path / "judged.json"
    # The trial, and then "A" in one order and no verdict or a tie in the other.
    replies = (verdict("A"), verdict("A"), (404, {}, ""), verdict("A"), verdict("neither"), verdict("A"), verdict("A"))
    with Server(in_turn(*replies)) as server:
        judge = ("--judge", server.url, "--judge-model", "grader", "--judge-concurrency", 1)
        words = list(map(str, ("judge", *made, "--questions", questions, "--out", out)))
        assert cli.main([*words, *map(str, judge)]) == 0
        shown, complaints = capsys.readouterr()
        assert "the judge gave 1 of 3 pairs no verdict" in complaints
    assert "33.3" in shown and KEY not in out.read_text() + shown + complaints
    assert "The 1. It rained." in server.requests[3][2]["messages"][0]["content"]
    (row,) = json.loads(out.read_text())["rows"]
    # One is lost to the missing verdict, one won by A and a tie, one a tie of two A's.
    assert row["metrics"] == pytest.approx({"win": 100 / 3, "lose": 0, "tie": 100 / 3})
    assert cli.main(words) == 2
    assert one_line(capsys.readouterr().err.splitlines(), "--judge: expected a URL, such as http")
