"""Judges: a function, and an endpoint played by a local server whose replies the test sets."""

import json
import threading
import time
from dataclasses import replace

import pytest
from endpoint import KEY, RIGHT, Server, in_turn, reply

from gistkit.compress import ICAE
from gistkit.evaluate import Example, Report, compare
from gistkit_lab.evaluate import endpoint
from gistkit_lab.evaluate.endpoint import objects
from gistkit_lab.evaluate.judge import Answered, JudgeError, OpenAIJudge, judge_report, judged, questions_of
from tests.helpers.models import byte_tokenizer, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTION, REFERENCE, ANSWER = "Where?", "Rome", "In Rome."


def test_a_request_is_the_interfaces_and_its_prompt_the_template():
    with Server(in_turn(RIGHT)) as server:
        template = "{context}|{question}|{reference}|{answer}|{other} {"
        judge = OpenAIJudge(server.url + "/", "grader", template=template, key=KEY, settings={"max_tokens": 9})
        # What the texts hold is no field of the template.
        assert judge("{answer}?", "Rome", "a\nb", context="{reference}") == 1
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}" and headers["Content-Type"] == "application/json"
    assert body == {
        "model": "grader",
        "messages": [{"role": "user", "content": "{reference}|{answer}?|Rome|a\nb|{other} {"}],
        "temperature": 0,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0}', 0),
        ('Because it does. ```json\n{"reason": "x", "score": 0.5}\n```', 0.5),
        ('{"score": 0} no: {"score": 1}', 1),
        ('{"score": true}', 1),
        ('{"score": 1} {"note": 3}', 1),
        (r'{"reason": "it has {x} and \\frac{1}{2}", "score": 1}', 1),
    ],
)
def test_the_last_score_of_a_reply_counts(text, score):
    with Server(in_turn((200, {}, reply(text)))) as server:
        assert OpenAIJudge(server.url, "grader")(QUESTION, REFERENCE, ANSWER) == score
        assert "Authorization" not in server.requests[0][1]


def test_a_reply_is_not_read_for_objects_without_end(monkeypatch):
    assert list(objects('{"a": {"b": 1}} {')) == [{"b": 1}, {"a": {"b": 1}}]
    monkeypatch.setattr(endpoint, "MOST_READ", 100)
    assert [*objects('{"b": 1}' + '{"a":' * 20)] == []


@pytest.mark.parametrize(
    "bad",
    [
        (500, {}, "busy"),
        (429, {"Retry-After": "0"}, ""),
        (500, {"Transfer-Encoding": "chunked"}, "ends early"),
        (200, {}, reply("I think it is right.")),
        (200, {}, reply('{"score": 7}')),
        (200, {}, "no JSON"),
        (200, {}, '{"choices": []}'),
        (200, {}, '{"choices": [{"message": {"content": null}}]}'),
    ],
)
def test_what_may_pass_is_tried_again_so_many_times(bad):
    with Server(in_turn(bad, bad, RIGHT)) as server:
        assert OpenAIJudge(server.url, "grader", wait=0)(QUESTION, REFERENCE, ANSWER) == 1
        assert len(server.requests) == 3
    with Server(in_turn(bad)) as server:
        message = r"^judge: expected a score from grader at http:\S+, got none in 2 attempts"
        with pytest.raises(JudgeError, match=message):
            OpenAIJudge(server.url, "grader", wait=0, attempts=2)(QUESTION, REFERENCE, ANSWER)
        assert len(server.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 404])
def test_other_refusals_are_final_and_never_show_the_key(status):
    with Server(in_turn((status, {}, f"no model here,\n key {KEY}"))) as server:
        judge = OpenAIJudge(server.url, "grader", key=KEY)
        with pytest.raises(JudgeError, match=f"in 1 attempt: HTTP {status} ") as error:
            judge.check()
        assert len(server.requests) == 1
    message = str(error.value)
    assert "\n" not in message and KEY not in message
    assert ("no model here" in message) == (status != 401)
    assert KEY not in repr(judge) and KEY not in json.dumps(judge.description)


def test_the_key_goes_nowhere_else():
    with Server(in_turn(RIGHT)) as other:
        moved = (302, {"Location": other.url + "/chat/completions"}, "")
        with Server(in_turn(moved)) as server, pytest.raises(JudgeError, match="HTTP 302"):
            OpenAIJudge(server.url, "grader", key=KEY)(QUESTION, REFERENCE, ANSWER)
        assert not other.requests


def test_a_silent_or_missing_server_is_an_error_in_a_line():
    gone = threading.Event()
    late = lambda number, body: (gone.wait(60), RIGHT)[1]  # noqa: E731
    with Server(late) as server:
        with pytest.raises(JudgeError, match="timed out"):
            OpenAIJudge(server.url, "grader", timeout=0.05, attempts=1)(QUESTION, REFERENCE, ANSWER)
        gone.set()
        url = server.url
    with pytest.raises(JudgeError, match=r"got none in 2 attempts: .*refused") as error:
        OpenAIJudge(url, "grader", attempts=2, wait=0)(QUESTION, REFERENCE, ANSWER)
    assert "\n" not in str(error.value)


def test_waits_grow_and_are_bounded(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    slow, very_slow, busy = (429, {"Retry-After": "5"}, ""), (503, {"Retry-After": "999"}, ""), (500, {}, "")
    with Server(in_turn(busy, busy, slow, very_slow, RIGHT)) as server:
        assert OpenAIJudge(server.url, "grader", wait=1, attempts=5)(QUESTION, REFERENCE, ANSWER) == 1
    assert waits == [1, 2, 5, 30]


def test_a_few_requests_run_at_a_time_and_scores_keep_their_order():
    three = threading.Barrier(3)

    def answer(number, body):
        # None is answered before there are three.
        three.wait(60)
        prompt = body["messages"][0]["content"]
        return 200, {}, reply(json.dumps({"score": int(prompt.split("/")[2]) / 10}))

    answers = [Answered("q", ["r"], str(score)) for score in range(9)]
    done = []
    with Server(answer) as server:
        judge = OpenAIJudge(server.url, "grader", template="{question}/{reference}/{answer}", concurrency=3)
        scores = judged(judge, answers, on_answer=lambda: done.append(1))
    assert scores == [score / 10 for score in range(9)] and len(done) == 9
    assert server.most == 3


def test_the_best_of_several_references_counts_and_a_right_one_ends_the_search():
    asked = []

    def judge(question, reference, answer):
        asked.append(reference)
        if reference == "broken":
            raise JudgeError("no")
        return {"a": 0.25, "b": 1}.get(reference, 0.0)

    answers = [
        Answered("q", ["c", "a", "c"], "x"), Answered("q", ["b", "a"], "x"),
        Answered("q", ["broken"], "x"), Answered("q", ["broken", "a"], "x"),
    ]  # fmt: skip
    assert judged(judge, answers) == [0.25, 1, None, 0.25]
    assert asked == ["c", "a", "b", "broken", "broken", "a"]
    for wrong in (2, -1, float("nan"), "1", None):
        with pytest.raises(ValueError, match="judge: expected a score from 0 to 1, got"):
            judged(lambda *_, wrong=wrong: wrong, answers)
    with pytest.raises(ZeroDivisionError):
        judged(lambda *_: 1 / 0, answers)


DATA = [
    Example("It rained.", question=" Did it? ", answers=["yes", "it did"]),
    Example("It snowed.", question=" Where? ", answers=["here"]),
    Example("Nothing asked."),
]


@pytest.fixture(scope="module")
def answered():
    compressor = ICAE(tiny_llama(vocab_size=260), chunk=8, ratio=4, lora=2).eval()
    settings = {"tokenizer": byte_tokenizer(), "tasks": ["qa"], "max_new_tokens": 3, "progress": False}
    return compare({"ours": compressor}, DATA, **settings)


def test_an_evaluation_asks_a_function(answered, tmp_path):
    seen, asked = [], questions_of(DATA, byte_tokenizer())

    def strict(question, reference, answer):
        seen.append((question, reference, answer))
        return reference == "it did"

    report = judge_report(answered, asked, strict, progress=False)
    row = report["ours"]
    first, second, _ = (result.prediction for result in row.examples)
    assert seen == [("Did it?", "yes", first), ("Did it?", "it did", first), ("Where?", "here", second)]
    assert [result.judge for result in row.examples] == [1, 0, None]
    assert row.metrics["qa_judge"] == 50 and row.counts["qa_judged"] == 2
    assert report.settings["judge"] == "strict" and "QA judge" in report.table()
    assert Report.load(report.save(tmp_path / "report.json", examples=True)) == report

    # Another judge's scores are its own, and the report that it is given stays as it is.
    def none(*texts):
        raise JudgeError("no")

    assert judge_report(report, asked, lambda *texts: 0, progress=False)["ours"].metrics["qa_judge"] == 0
    again = judge_report(report, asked, none, progress=False)["ours"]
    assert "qa_judge" not in again.metrics and "qa_judged" not in again.counts
    assert report["ours"] == row and {result.judge for result in answered["ours"].examples} == {None}
    with pytest.raises(ValueError, match="report: expected results of 3 examples, got 0 of ours"):
        judge_report(Report((replace(row, examples=()),), {}), asked, strict)


def test_an_evaluation_asks_an_endpoint_and_goes_on_without_a_score(answered, tmp_path, capsys):
    def answer(number, body):
        prompt = body["messages"][0]["content"]
        return (404, {}, "no") if "It rained." in prompt else RIGHT

    with Server(answer) as server:
        judge = OpenAIJudge(server.url, "grader", key=KEY)
        report = judge_report(answered, questions_of(DATA, byte_tokenizer()), judge)
    row = report["ours"]
    assert [result.judge for result in row.examples] == [None, 1, None]
    assert row.metrics["qa_judge"] == 100 and row.counts["qa_judged"] == 1 and row.counts["qa_examples"] == 2
    assert report.settings["judge"]["model"] == "grader" and report.settings["judge"]["url"] == server.url
    # By default the judge reads the whole document, as GistPool's does.
    assert any("It snowed." in body["messages"][0]["content"] for _, _, body in server.requests)
    assert KEY not in report.save(tmp_path / "report.json", examples=True).read_text()
    shown = capsys.readouterr()
    assert "ours, judged: 100%" in shown.err and KEY not in shown.err + shown.out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url: expected an address such as http://localhost:8000/v1, got 'localhost:8000'"),
        ({"url": "file:///etc/passwd"}, "url: expected an address such as"),
        ({"url": "http://[x"}, "url: expected an address such as"),
        ({"url": None}, "url: expected an address such as"),
        ({"url": "http://me:secret@host/v1"}, "url: expected no user or password in it, got one"),
        ({"model": ""}, "model: expected the name of a model, got ''"),
        ({"template": "{question} {answer}"}, r"template: expected \{reference\} in it"),
        ({"key": "a\nb"}, "key: expected printable ASCII without white space, got something else"),
        ({"attempts": 0}, "attempts: expected at least 1, got 0"),
        ({"concurrency": 0}, "concurrency: expected at least 1, got 0"),
        ({"wait": -1}, "wait: expected at least 0, got -1"),
        ({"timeout": 0}, "timeout: expected a number above 0, got 0"),
    ],
)
def test_mistakes_name_the_argument(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        OpenAIJudge(**{"url": "http://localhost:1/v1", "model": "grader"} | settings)
    assert "secret" not in str(error.value)
