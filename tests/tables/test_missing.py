"""Tables of judges, masks, writers, languages and lengths, each made end to end with tiny models."""

import json

import pytest

from tests.evaluate.test_judge import Server, reply
from tests.tables.test_tables import call, folder  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "text.jsonl"
    rows = [{"text": f"On day {day} it rained {day * 7 % 10} times. " * 8} for day in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"context": f"It rained on day {n}. " * 3, "question": "When?", "answers": [f"day {n}"]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    """The cells of the table in a file, a list a line."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.slow
def test_table_3_of_the_compression_loss(folder, texts, questions, tmp_path, capsys):  # noqa: F811
    small = "--steps 1 --batch 2 --held-out 2 --max-length 60"
    words = (
        "cl-3", "--model", folder, "--out", tmp_path / "cl", "--arms", "wo CL vs wo CL + PI",
        "--more", f"pretrain={small} --min-length 60 --longer-than 100 --chunk 30 --option lora=2",
        "--more", f"finetune={small} --min-length 8", "--more", "answers=--max-new-tokens 4",
        *(word for name, path in (("text", texts), ("train", questions), ("test", questions))
          for word in ("--data", f"{name}={path}")),
    )  # fmt: skip
    # Who likes the first place has no say, and the first question gets no verdict.
    answer = lambda number, body: (  # noqa: E731
        (404, {}, "") if "day 0" in body["messages"][0]["content"] else (200, {}, reply('{"better": "A"}'))
    )
    with Server(answer) as server:
        assert call(*words, "--more", f"judge=--judge {server.url} --judge-model grader") == 0, capsys.readouterr().err
        assert len(server.requests) == 1 + 2 * 2 + 1
    head, _, row = rows_of(tmp_path / "cl" / "cl-3.md")
    assert head[1:] == ["Win", "Lose", "Tie"]
    assert row == ["wo CL vs wo CL + PI", "0.0 (37.1)", "0.0 (16.7)", "66.7 (45.0)"]
    # The runs are those of Table 2.
    assert (tmp_path / "cl" / "15x-ae-lm-dpl" / "finetune" / "compressor").is_dir()
