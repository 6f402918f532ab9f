"""A writer: what it is asked, what its answers score, and how much shorter its texts are."""

import json

import pytest

from gistkit.evaluate import Example, Report
from gistkit_lab.evaluate.judge import JudgeError
from gistkit_lab.evaluate.written import OpenAIWriter, WriterError, evaluate_written
from tests.cli.test_cli import folder, one_line, run  # noqa: F401 - fixtures
from tests.helpers.endpoint import KEY, Server, in_turn, reply
from tests.helpers.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = "one two three four five six seven eight"


class Writer:
    """Keeps the first words, and answers with the last of them."""

    def __init__(self):
        self.description = {"name": "test"}
        self.shortened, self.asked = [], []

    def shorten(self, context, words):
        self.shortened.append((context, words))
        if context == "none":
            raise WriterError("no")
        return " ".join(context.split()[:words])

    def answer(self, context, question):
        self.asked.append((context, question))
        if question == "broken":
            raise WriterError("no")
        return context.split()[-1] + "\nindeed"


def test_answers_come_from_what_was_written_and_both_are_measured(tmp_path):
    data = [
        Example(CONTEXT, question=" Last? ", answers=["four"]),
        Example(CONTEXT, question="Which?", answers=["five", "six"]),
        Example("Nothing asked."),
        Example("none", question="Last?", answers=["none"]),
        Example("a b", question="broken", answers=["x"]),
    ]
    writer, seen = Writer(), []

    def judge(question, reference, answer):
        seen.append((question, reference, answer))
        if reference == "x":
            raise JudgeError("no")
        return reference == answer

    done = []
    report = evaluate_written(
        writer, data, ratio=2, tokenizer=byte_tokenizer(), judge=judge, on_answer=lambda: done.append(1)
    )
    # A context is shortened once, into a word of two, and never for what nobody asked about.
    assert writer.shortened == [(CONTEXT, 4), ("none", 1), ("a b", 1)]
    assert writer.asked == [("one two three four", "Last?"), ("one two three four", "Which?"), ("a", "broken")]
    (row,) = report.rows
    assert row.method == "Written 2x" and len(done) == 4 and row.counts["unwritten"] == 1
    assert [each.prediction for each in row.examples] == ["four", "four", "", ""]
    assert row.examples[0].output == "four\nindeed" and row.metrics["qa_exact_match"] == 25
    assert [each.judge for each in row.examples] == [1, 0, 0, None] and row.metrics["qa_judge"] == pytest.approx(
        100 / 3
    )
    assert seen[0] == ("Last?", "four", "four")
    # Bytes are tokens here, with one before each context.
    sizes = [len(text.encode()) for text in ("one two three four", "one two three four", "", "a")]
    assert [each.tokens_read for each in row.examples] == sizes
    first = len(byte_tokenizer()("")["input_ids"])
    whole = 2 * len(CONTEXT) + len("none") + len("a b") + 4 * first
    assert row.metrics["written_ratio"] == pytest.approx(whole / sum(sizes))
    assert "cache_bytes" not in row.metrics and "qa_loss" not in row.metrics
    assert "Written 2x" in report.table() and " ratio " in report.table()
    assert Report.load(report.save(tmp_path / "report.json", examples=True)) == report


def test_a_cut_leaves_no_more_tokens_than_a_compressor_has():
    class Long(Writer):
        def shorten(self, context, words):
            return context

    report = evaluate_written(
        Long(), [Example(CONTEXT, question="q", answers=["x"])], ratio=3, tokenizer=byte_tokenizer(), cut=True
    )
    (result,) = report.rows[0].examples
    assert result.tokens_read == -(-len(CONTEXT) // 3) and report.settings["cut"]
    assert result.prediction == CONTEXT[: result.tokens_read].split()[-1]


def test_requests_and_mistakes():
    with Server(in_turn((200, {}, reply(" ")), (200, {}, reply(" short ")), (200, {}, reply("yes")))) as server:
        writer = OpenAIWriter(
            server.url, "large", template="{words}/{context}", answer_template="{context}?{question}", key=KEY, wait=0
        )
        assert writer.shorten("a {words} b", 7) == "short" and writer.answer("text", "why") == "yes"
    prompts = [body["messages"][0]["content"] for _, _, body in server.requests]
    assert prompts == ["7/a {words} b", "7/a {words} b", "text?why"] and KEY not in json.dumps(writer.description)
    with Server(in_turn((404, {}, "no"))) as server, pytest.raises(WriterError, match=r"^writer: expected a shortened"):
        OpenAIWriter(server.url, "large").check()
    for settings, message in (({"template": "{context}"}, "words"), ({"answer_template": "{question}"}, "context")):
        with pytest.raises(ValueError, match=f"template: expected {{{message}}} in it"):
            OpenAIWriter("http://localhost:1/v1", "large", **settings)
    for settings, message in (
        ({"ratio": 0.5}, "ratio: expected a number of at least 1"),
        ({"tokenizer": None}, "token"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_written(Writer(), [Example("a")], **{"ratio": 2, "tokenizer": byte_tokenizer()} | settings)


def test_a_writer_on_the_command_line(run, tmp_path, monkeypatch):  # noqa: F811
    questions, out = tmp_path / "questions.jsonl", tmp_path / "report.json"
    rows = [{"context": f"Day {n}. It rained a lot.", "question": "Which?", "answers": [str(n)]} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("GISTKIT_WRITER_KEY", KEY)

    def answer(number, body):
        prompt = body["messages"][0]["content"]
        if '"score"' in prompt:
            return 200, {}, reply('{"score": 1}')
        return 200, {}, reply("Day 1" if "Day 1" in prompt else "Day")

    with Server(answer) as server:
        words = ("--questions", questions, "--writer", server.url, "--writer-model", "large", "--out", out)
        judge = ("--judge", server.url, "--judge-model", "grader")
        status, shown, complaints = run("evaluate", *words, *judge, "--written-ratio", 3, "--keep-examples")
    assert status == 0 and "Written 3x" in shown and KEY not in shown + complaints + out.read_text()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["metrics"]["qa_contains_answer"] == pytest.approx(100 / 3) and row["metrics"]["qa_judge"] == 100
    # The trials, then a text and an answer each, and their scores.
    assert len(server.requests) == 2 + 2 * 3 + 3
    assert {headers.get("Authorization") for _, headers, _ in server.requests} == {f"Bearer {KEY}", None}
    for words, message in (
        (("--written-ratio", 2, "--questions", questions), "--writer: expected a URL, such as"),
        (("--writer", "http://localhost:1/v1"), "--questions: required with --writer"),
        (("--writer", "x", "--tau", 4), "--tau: not allowed with --writer, got 4"),
    ):
        status, _, complaints = run("evaluate", *words)
        assert status == 2 and one_line(complaints.splitlines(), message)
