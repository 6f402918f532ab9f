"""What the lab adds to `gistkit evaluate`: a judge, the papers' prompt beside a summary, and several sets."""

import json
import shutil

import pytest
from endpoint import KEY, RIGHT, Server, in_turn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gistkit import cli
from gistkit.evaluate import Markers
from gistkit_lab.evaluate.command import whole_documents
from gistkit_lab.evaluate.summary_context import SummaryContext
from tests.cli.test_cli import TEXT, folder, one_line, run  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"context": f"The {n}. It rained.", "question": "Which?", "answers": [str(n)]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_endpoint_judges(run, questions, tmp_path, monkeypatch, several):  # noqa: F811
    monkeypatch.setenv("GISTKIT_JUDGE_KEY", KEY)
    prompt, out, other = (tmp_path / name for name in ("prompt.txt", "a-b.json", "other.jsonl"))
    prompt.write_text("{question}/{reference}/{answer}")
    other.write_text("".join(questions.read_text().replace("The", "Our").splitlines(keepends=True)[:2]))
    bad = (400, {}, "too long")
    # The first reply is to the trial, and the first answer of each set has none.
    answer = lambda number, body: bad if "/0/" in body["messages"][0]["content"] else RIGHT  # noqa: E731
    words = ["--baselines", "", "--max-new-tokens", 3, "--method", "icae", "--out", out, "--questions", questions]
    with Server(answer) as server:
        judge = ("--judge", server.url, "--judge-model", "grader", "--judge-prompt", prompt, "--judge-concurrency", 2)
        status, shown, complaints = run("evaluate", *words, *([other] if several else []), *judge)
    assert status == 0 and "QA judge" in shown and ("mean of 2 sets" in shown) == several, complaints
    sizes = {" to questions": 3, " to other": 2} if several else {"": 3}
    for where, count in sizes.items():
        assert f"the judge gave 1 of {count} answers{where} of ICAE EPL 5x no score" in complaints
    keys = [headers["Authorization"] for _, headers, _ in server.requests]
    assert keys == [f"Bearer {KEY}"] * (1 + sum(sizes.values()))
    written = out.read_text()
    assert KEY not in written + shown + complaints
    report = json.loads(written)
    reports = report["sets"] if several else [report]
    for each, count in zip(reports, sizes.values(), strict=True):
        assert each["settings"]["judge"]["model"] == "grader" and each["rows"][0]["metrics"]["qa_judge"] == 100
        assert each["rows"][0]["counts"]["qa_judged"] == count - 1


def test_a_judge_that_cannot_answer_is_known_before_the_evaluation(run, questions, tmp_path):  # noqa: F811
    out = tmp_path / "report.json"
    with Server(in_turn((404, {}, "no such model"))) as server:
        words = ("--questions", questions, "--judge", server.url, "--judge-model", "grader", "--out", out)
        status, shown, complaints = run("evaluate", *words)
    assert status == 2 and not shown and not out.exists()
    assert one_line(complaints.splitlines(), "judge: expected a score from grader at http://127.0.0.1")
    assert "no such model" in complaints and len(server.requests) == 1


@pytest.mark.slow
def test_questions_in_the_papers_prompt_beside_a_summary(folder, tmp_path, capsys):  # noqa: F811
    questions, measured, chat = tmp_path / "questions.jsonl", tmp_path / "evaluation.json", tmp_path / "chat"
    shutil.copytree(folder, chat)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "<u>{{ messages[0]['content'] }}</u>{{ '<m>' if add_generation_prompt }}"
    tokenizer.save_pretrained(chat)
    rows = [{"context": f"{TEXT} The {n}.", "question": f"Which {n}?", "answers": [str(n)]} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", chat, "--compressor", folder / "x500", "--questions", questions, "--prompt", "dodo"]
    words += ["--tasks", "qa", "--baselines", "none,full,summary", "--max-new-tokens", 8, "--out", measured]
    assert cli.main(["evaluate", *map(str, words), "--keep-examples"]) == 0
    assert " QA accuracy " in capsys.readouterr().out
    found = {row["method"]: row["examples"] for row in json.loads(measured.read_text())["rows"]}
    assert list(found) == ["NoContext", "FiveHundredX EPL 5x", "SummaryContext 5x", "FullContext"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for row, example in zip(rows, found["FullContext"], strict=True):
        prompt = (
            f"<u>{row['context']}\nBased on the provided document, answer the following question:\n"
            f"{row['question']}</u><m>"
        )
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        made = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=256)
        answer = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert example["output"] == answer.strip() and example["answers"] == row["answers"]
        assert example["tokens_read"] == len("<u>" + row["context"])
    # The opening marker, and the summary of what follows it.
    reader = SummaryContext(model, tokenizer, ratio=5, markers=Markers("<u>", "</u><m>"))
    summaries = reader.summaries([tokenizer(row["context"])["input_ids"] for row in rows])
    read = [example["tokens_read"] for example in found["SummaryContext 5x"]]
    assert read == [len(tokenizer(f"<u>{summary}")["input_ids"]) for summary in summaries]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judge", "http://localhost:1/v1"], "--judge-model: expected the model's name with --judge, got none"),
        (["--judge-model", "x"], "--judge-model: not allowed without --judge, got x"),
        (["--judge", "ftp://x", "--judge-model", "x"], "url: expected an address such as http://localhost:8000/v1"),
        (["--documents"], "--documents: not allowed without --text"),
        (["--documents", "--text", ".", "--continuation", "3"], "--continuation: not allowed with --documents, got 3"),
        (["--documents", "--text", ".", "--split", "test"], "--split: not allowed with --documents, got test"),
        (["--tau", "4", "--judge", "x"], "--judge: not allowed with --tau, got x"),
        (["--prompt", "dodo"], "--prompt: expected plain without --questions, got dodo"),
        (["--baselines", "recent,summary"], "--baselines: expected some of none, full, summary without --tau"),
        (["--baselines", "recent"], "--baselines: expected some of none, full, summary without --tau, got recent"),
        (["--segment", "4"], "--segment: not allowed without --tau, got 4"),
        (["--excluded-words", "<unk>"], "--excluded-words: not allowed without --tau, got ('<unk>',)"),
        (["--tau", "4", "--keep-examples"], "--keep-examples: not allowed with --tau, got True"),
        (["--tau", "4", "--tasks", "lm"], "--tasks: not allowed with --tau, got ['lm']"),
        (["--tau", "4", "--split", "train"], "--split: expected validation or test without --questions, got train"),
        (["--tau", "4", "--baselines", "none"], "--baselines: expected some of recent, full with --tau"),
        (
            ["--tau", "4"],
            "compressor: expected dodo or avgpool, which language models read with, got select",
        ),
        # Those read a text before they know.
        pytest.param(
            ["--tau", "64", "--method", "avgpool", "--ratio", "4", "--context", "40", "--continuation", "9"],
            "--tau: expected less than a passage, 49 tokens, got 64",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_are_told_in_a_line(run, words, message):  # noqa: F811
    status, shown, complaints = run("evaluate", *words)
    assert status == 2 and not shown and one_line(complaints.splitlines()[-1:], message)


def test_whole_documents_are_those_of_the_files_and_none_is_held_out(tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("".join(json.dumps({"text": f"Document {n}."}) + "\n" for n in range(3)))
    (rows / "test.jsonl").write_text(json.dumps({"text": "Last\nlines."}) + "\n")
    assert list(whole_documents(rows)) == ["Last\nlines.", *(f"Document {n}." for n in range(3))]
    wiki = tmp_path / "wiki.test.tokens"
    wiki.write_text(" \n = One = \n \n text one \n \n = Two = \n \n text two \n")
    assert [document.split() for document in whole_documents(wiki)] == [
        ["=", name, "=", "text", name.lower()] for name in ("One", "Two")
    ]
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("b", "a"):
        (texts / f"{name}.txt").write_text(f"{name} and more")
    assert list(whole_documents(texts)) == ["a and more", "b and more"]
    with pytest.raises(FileNotFoundError, match=r"text: expected a file or a folder, got .*none"):
        list(whole_documents(tmp_path / "none"))
